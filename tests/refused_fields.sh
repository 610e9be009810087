#!/usr/bin/env bash
# refused_fields.sh INCLUDE: fields that LOCKSTEP_MODULE refuses at compile time, with a text that tells what to
# write instead; and the same class with a field that it takes compiles.
set -euo pipefail
include=$1 bad=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
compile() {  # FIELD: a class that names a field `x` of that declaration
  c++ -std=c++20 -fsyntax-only -x c++ -I"$include" - >"$log" 2>&1 <<END
#include <deque>
#include <list>
#include <map>
#include <lockstep/nn/linear.h>
using namespace lockstep;
struct Net : nn::Module {
  $1
  Tensor forward(Tensor t) { return t; }
  LOCKSTEP_MODULE(Net, x)
};
END
}
refuse() {  # TEXT FIELDS...
  local text=$1 field
  shift
  for field; do
    if compile "$field"; then
      echo "$field: it compiles" && bad=1
    elif ! grep -q "$text" "$log"; then
      echo "$field: refused without \"$text\":" && grep -m3 error "$log" && bad=1
    fi
  done
}
for field in 'nn::Linear x{1, 1};' 'int x = 1;' 'std::vector<nn::Parameter> x;' 'std::function<int()> x;'; do
  compile "$field" || { echo "$field: refused:" && grep -m3 error "$log" && bad=1; }
done
refuse 'a plain Tensor is named in LOCKSTEP_MODULE' 'Tensor x;' 'std::optional<int> y; const Tensor x;'
refuse 'a raw pointer is named in LOCKSTEP_MODULE' 'nn::Linear* x;' 'Tensor* x;' 'std::vector<nn::Linear>* x;'
refuse 'LOCKSTEP_MODULE takes modules, parameters and buffers' 'std::map<int, nn::Linear> x;' 'std::deque<nn::Linear> x;' \
  'std::list<nn::Parameter> x;' 'std::vector<Tensor> x;' 'std::optional<Tensor> x;' 'std::vector<nn::Linear*> x;' \
  'std::tuple<int, nn::Linear> x;' 'std::pair<Tensor, int> x;' 'std::unique_ptr<std::vector<nn::Linear>> x;' \
  'std::variant<int, Tensor> x;' 'std::weak_ptr<nn::Linear> x;' 'struct { int n; nn::Linear fc{1, 1}; } x;' 'nn::Linear x[2];'
exit $bad
