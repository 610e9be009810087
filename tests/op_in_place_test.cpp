// Every in-place form: on every dtype and layout, through views of a larger tensor, with operands
// that are the tensor itself or overlap it, and with the gradient that follows the write, through
// views too.
#include <doctest/doctest.h>

#include <lockstep/autograd/grad.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/join.h>

#include "op_driver/checks.h"

using namespace op_driver;

namespace {

/// x.op_(other), or x.op_() where `other` is not used: each element becomes f(x, other).
struct Form {
  std::string name;
  bool binary;
  std::function<Tensor&(Tensor& x, const Tensor& other)> call;
  std::function<Real(Real x, Real other)> f;
  std::vector<DType> dtypes = kFloats;
  Operand values = {};
};

std::vector<Form> forms() {
  const std::vector<DType> numbers{DType::f32, DType::f64, DType::i64, DType::i32, DType::i16, DType::i8, DType::u8};
  const Operand positive{.low = 0.5, .high = 4};
  using T = Tensor;
  return {
      {"copy_", true, [](T& x, const T& o) -> T& { return x.copy_(o); },
       [](Real, Real o) { return o; }, kAll},
      {"fill_",
       false,
       [](T& x, const T&) -> T& { return x.fill_(3); },
       [](Real, Real) { return Real(3); },
       {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i64, DType::i32, DType::i16, DType::i8, DType::u8}},
      {"zero_", false, [](T& x, const T&) -> T& { return x.zero_(); },
       [](Real, Real) { return Real(0); }, kAll},
      {"add_", true, [](T& x, const T& o) -> T& { return x.add_(o); },
       [](Real x, Real o) { return x + o; }, numbers},
      {"add_, alpha", true, [](T& x, const T& o) -> T& { return x.add_(o, 2); },
       [](Real x, Real o) { return x + 2 * o; }, numbers},
      {"add_ a number", false, [](T& x, const T&) -> T& { return x.add_(3); },
       [](Real x, Real) { return x + 3; }, numbers},
      {"sub_", true, [](T& x, const T& o) -> T& { return x.sub_(o); },
       [](Real x, Real o) { return x - o; }, numbers},
      {"mul_", true, [](T& x, const T& o) -> T& { return x.mul_(o); },
       [](Real x, Real o) { return x * o; }, numbers},
      {"mul_ a number", false, [](T& x, const T&) -> T& { return x.mul_(3); },
       [](Real x, Real) { return x * 3; }, numbers},
      {"+=", true, [](T& x, const T& o) -> T& { return x += o; },
       [](Real x, Real o) { return x + o; }, numbers},
      {"-=", true, [](T& x, const T& o) -> T& { return x -= o; },
       [](Real x, Real o) { return x - o; }, numbers},
      {"*=", true, [](T& x, const T& o) -> T& { return x *= o; },
       [](Real x, Real o) { return x * o; }, numbers},
      {"div_", true, [](T& x, const T& o) -> T& { return div_(x, o); },
       [](Real x, Real o) { return x / o; }, kFloats, positive},
      {"div_ a number", false, [](T& x, const T&) -> T& { return div_(x, 4); },
       [](Real x, Real) { return x / 4; }},
      {"relu_", false, [](T& x, const T&) -> T& { return relu_(x); },
       [](Real x, Real) { return std::max(x, Real(0)); }, numbers},
      {"leaky_relu_", false, [](T& x, const T&) -> T& { return leaky_relu_(x, 0.25); },
       [](Real x, Real) { return x > 0 ? x : x / 4; }},
      {"sigmoid_", false, [](T& x, const T&) -> T& { return sigmoid_(x); },
       [](Real x, Real) { return 1 / (1 + std::exp(-x)); }},
      {"tanh_", false, [](T& x, const T&) -> T& { return tanh_(x); },
       [](Real x, Real) { return std::tanh(x); }},
      {"exp_", false, [](T& x, const T&) -> T& { return exp_(x); },
       [](Real x, Real) { return std::exp(x); }},
      {"sqrt_", false, [](T& x, const T&) -> T& { return sqrt_(x); },
       [](Real x, Real) { return std::sqrt(x); }, kFloats, positive},
      {"abs_", false, [](T& x, const T&) -> T& { return abs_(x); },
       [](Real x, Real) { return std::fabs(x); }, numbers},
      {"neg_", false, [](T& x, const T&) -> T& { return neg_(x); }, [](Real x, Real) { return -x; },
       numbers},
      {"clamp_", false, [](T& x, const T&) -> T& { return clamp_(x, -1, 1); },
       [](Real x, Real) { return std::clamp(x, Real(-1), Real(1)); }, numbers},
  };
}

/// Those that this run includes for a check.
std::vector<Form> forms_for(const std::string& check) {
  std::vector<Form> chosen = forms();
  std::erase_if(chosen, [&](const Form& f) { return !is_chosen(check + f.name); });
  return chosen;
}

/// What x should hold after the form, given what both hold before.
Array applied(const Form& form, const Array& x, const Array& other, DType t) {
  return tabulate(x.shape, [&](const Shape& i) {
    const Real v = form.f(x(i), form.binary ? other(i) : 0);
    if (t == DType::boolean) return Real(v != 0);
    if (t == DType::i8) return Real(static_cast<int8_t>(static_cast<int64_t>(v)));
    if (t == DType::i16) return Real(static_cast<int16_t>(static_cast<int64_t>(v)));
    return t == DType::u8 ? static_cast<uint8_t>(static_cast<int64_t>(v)) : v;
  });
}

/// Runs the form, and checks x's elements and that no other byte of its storage has changed.
void check_form(const Form& form, const std::string& what, Tensor x, const Tensor& other) {
  INFO(what);
  const Storage& storage = x.storage();
  const char* const bytes = static_cast<const char*>(storage.data());
  const std::vector<char> before(bytes, bytes + storage.bytes());
  const Array want = applied(form, read(x), form.binary ? read(other) : Array(), x.dtype());
  const uint32_t version = storage.version();
  const Tensor& result = form.call(x, other);
  CHECK(result.is_same(x));
  check_agree(what, x, want, tolerance_of(x.dtype()));
  CHECK(storage.version() > version);
  std::vector<bool> own(before.size());
  cases::for_each_element(x, [&](int64_t, char* p) {
    for (size_t b = 0; b < size_of(x.dtype()); ++b) own[static_cast<size_t>(p - bytes) + b] = true;
  });
  for (size_t i = 0; i < before.size(); ++i)
    if (bytes[i] != before[i] && !own[i]) {
      FAIL_CHECK(what << ": byte " << i << " of the storage, outside the tensor, has changed");
      return;
    }
}

Tensor filled(const Shape& shape, DType t, const Operand& values, std::mt19937& random) {
  Tensor x = empty(shape, {.dtype = t});
  write(x, values_for(values, t, x.numel(), random));
  return x;
}

/// x in each layout that can be written to.
std::vector<op_check::Layout> writable(const Shape& shape, DType t, const Operand& values,
                                       std::mt19937& random) {
  auto layouts =
      op_check::layouts(shape, [&](const Shape& s) { return filled(s, t, values, random); });
  std::erase_if(layouts, [](const op_check::Layout& l) { return l.name == "expanded"; });
  return layouts;
}

}  // namespace

TEST_CASE("in-place forms: every dtype, layout and broadcast operand") {
  for (const Form& form : forms_for("every dtype")) {
    std::mt19937 random = random_of(form.name);
    for (DType t : kAll)
      for (const Shape& shape : {Shape{4, 5}, Shape{2, 3, 2, 3}, Shape{}, Shape{0, 3}, Shape{1}})
        for (const op_check::Layout& x : writable(shape, t, form.values, random)) {
          const std::string what = str_cat(form.name, " of ", shape, ", ", t, ", ", x.name);
          Tensors others{filled({}, t, form.values, random), filled(shape, t, form.values, random)};
          if (shape.dims() > 1) {
            Shape column = shape;
            column[shape.dims() - 1] = 1;
            others.push_back(filled(column, t, form.values, random));
            others.push_back(filled({shape.back()}, t, form.values, random));
            others.push_back(filled(column, t, form.values, random).expand(shape));
          }
          for (const Tensor& other : others) {
            const Array before = read(x.x);
            try {
              check_form(form, what, x.x, other);
            } catch (const DTypeError& e) {
              INFO(what);
              CHECK_MESSAGE(
                  std::find(form.dtypes.begin(), form.dtypes.end(), t) == form.dtypes.end(),
                  std::string(e.what()));
              check_agree(what, x.x, before, 0);
            }
            write(x.x, before.v);
            if (!form.binary) break;
          }
        }
  }
}

TEST_CASE("in-place forms: operands of other dtypes are converted, or refused by kind") {
  for (const Form& form : forms_for("other dtypes")) {
    if (!form.binary) continue;
    std::mt19937 random = random_of(form.name);
    for (DType t : form.dtypes)
      for (DType from : kAll) {
        const Operand small{.low = 1, .high = 4};  // that every dtype holds
        const Tensor x = filled({3, 4}, t, small, random), other = filled({4}, from, small, random);
        const std::string what = str_cat(form.name, " of ", t, " with ", from);
        const Array before = read(x);
        if (form.name == "copy_" && !is_floating(t) && is_floating(from)) continue;  // truncates
        try {
          check_form(form, what, x, other);
        } catch (const DTypeError&) {
          CHECK_MESSAGE((form.name != "copy_" && !is_floating(t)), what);
          check_agree(what, x, before, 0);
        }
      }
  }
}

TEST_CASE("in-place forms: an operand that is the tensor, or lies over the same bytes") {
  for (const Form& form : forms_for("overlap")) {
    if (!form.binary) continue;
    std::mt19937 random = random_of(form.name);
    for (DType t : form.dtypes) {
      // 150: several pieces, and vector registers with a rest.
      for (int64_t n : {5, 150}) {
        Tensor x = empty({n, n}, {.dtype = t});
        const auto check = [&](const std::string& how, const Tensor& part, const Tensor& other) {
          write(x, values_for(form.values, t, x.numel(), random));
          check_form(form, str_cat(form.name, " of ", t, ", ", how), part, other);
        };
        check("itself", x, x);
        check("another handle", x, x.detach());
        check("transposed", x, x.t());
        check("onto its transpose", x.t(), x);
        check("shifted down", x.narrow(0, 1, n - 1), x.narrow(0, 0, n - 1));
        check("shifted up", x.narrow(0, 0, n - 1), x.narrow(0, 1, n - 1));
        check("shifted right", x.narrow(1, 1, n - 1), x.narrow(1, 0, n - 1));
        check("a row of itself", x, x[n - 1]);
        check("its column", x, x.narrow(1, 0, 1));
        check("an element of itself", x, x[n / 2][n / 2]);
        check("every second, interleaved", x.slice(1, {0, n / 2 * 2, 2}),
              x.slice(1, {1, n / 2 * 2, 2}));
        check("reversed roles of rows", x.slice(0, {0, 4, 2}), x.slice(0, {1, 4, 2}));
      }
    }
  }
}

TEST_CASE("in-place forms: a tensor that repeats elements is refused and unchanged") {
  for (const Form& form : forms_for("repeated elements")) {
    if (form.name == "fill_" || form.name == "zero_") continue;  // all elements alike: no harm
    std::mt19937 random = random_of(form.name);
    Tensor x = filled({3, 1}, DType::f32, form.values, random).expand({3, 4});
    const Array before = read(x);
    CHECK_THROWS_AS(form.call(x, x.contiguous()), ShapeError);
    check_agree(form.name, x, before, 0);
  }
}

// ---- gradients ----

namespace {

/// A chain of views of a [3, 4] tensor.
struct Route {
  std::string name;
  std::function<Tensor(const Tensor&)> take;
};
const std::vector<Route> kRoutes{
    {"whole", [](const Tensor& b) { return b; }},
    {"row", [](const Tensor& b) { return b[1]; }},
    {"column", [](const Tensor& b) { return b.select(1, 2); }},
    {"element", [](const Tensor& b) { return b[1][2]; }},
    {"steps",
     [](const Tensor& b) {
       return b.slice(1, {0, 4, 2});
     }},
    {"transposed", [](const Tensor& b) { return b.t(); }},
    {"flat part", [](const Tensor& b) { return b.view({12}).narrow(0, 2, 7); }},
    {"other shape",
     [](const Tensor& b) {
       return b.view({2, 6}).unsqueeze(1);
     }},
    {"views of views",
     [](const Tensor& b) {
       return b.slice(0, {1, 3}).t()[1];
     }},
};

/// For each element of a route's view, which of the base's it is.
std::vector<size_t> elements_of(const Route& route) {
  std::vector<size_t> list;
  for (Real v : read(route.take(arange(0, 12).view({3, 4}))).v)
    list.push_back(static_cast<size_t>(v));
  return list;
}

/// Compares the gradients of `program` with differences of `reference`, plain and recorded.
void check_program(const std::string& what, const op_check::Function& program,
                   const Reference& reference, const Tensors& leaves, std::mt19937& random) {
  INFO(what);
  Arrays at = read(leaves);
  try {
    const Tensor y = program(leaves);
    check_agree(what, y.detach(), reference(at), 1e-12);
    Tensor w = empty(y.shape(), {.dtype = DType::f64});
    write(w, values_for({}, DType::f64, w.numel(), random));
    const Array weights = read(w);
    for (bool create_graph : {false, true}) {
      const Tensors got = op_check::gradients(program, leaves, w, create_graph);
      for (size_t k = 0; k < leaves.size(); ++k)
        check_agree(
            str_cat(what, ": gradient ", k, create_graph ? ", recorded" : ""), got[k].detach(),
            slopes(at, k, [&](const Arrays& x) { return dot(weights, reference(x)); }), 1e-9);
    }
  } catch (const Error& e) {
    FAIL_CHECK(what << ": " << std::string(e.what()));
  }
}

Tensor flat_cat(const Tensors& parts) {
  Tensors flat;
  for (const Tensor& t : parts) flat.push_back(t.reshape({-1}));
  return cat(flat);
}

}  // namespace

TEST_CASE("in-place forms: the gradient follows a write through any view, to bases and siblings") {
  for (const Form& form : forms_for("gradients"))
    for (const Route& route : kRoutes)
      for (bool base_has_graph : {true, false}) {
        if (!form.binary && !base_has_graph) continue;
        std::mt19937 random = random_of(form.name + route.name);
        const std::vector<size_t> places = elements_of(route);
        const Tensor shaped = route.take(zeros({3, 4}));
        for (const Shape& other_shape : {shaped.shape(), Shape{}}) {
          Tensors leaves{filled({3, 4}, DType::f64, form.values, random).requires_grad_()};
          if (form.binary)
            leaves.push_back(filled(other_shape, DType::f64, form.values, random).requires_grad_());
          const auto program = [&](const Tensors& x) {
            Tensor base = base_has_graph ? x[0] * 1.0 : x[0].detach().clone();
            const Tensor sibling = base.narrow(0, 1, 1);
            Tensor part = route.take(base);
            form.call(part, form.binary ? x[1] : Tensor());
            return flat_cat({base, part, sibling});
          };
          const auto reference = [&](const Arrays& x) {
            // What has no graph is no function of its leaf.
            Array base = base_has_graph ? x[0] : read(leaves[0]);
            Array result({0});
            for (size_t i = 0; i < places.size(); ++i) {
              Real& v = base.v[places[i]];
              v = form.f(v, form.binary ? x[1].v[x[1].v.size() == 1 ? 0 : i] : 0);
            }
            result.v = base.v;
            for (size_t place : places) result.v.push_back(base.v[place]);
            result.v.insert(result.v.end(), base.v.begin() + 4, base.v.begin() + 8);
            result.shape = {static_cast<int64_t>(result.v.size())};
            return result;
          };
          check_program(
              str_cat(form.name, ", ", route.name,
                      base_has_graph ? "" : ", of a base without graph", ", other ", other_shape),
              program, reference, leaves, random);
          if (!form.binary || shaped.dim() == 0) break;
        }
      }
}

TEST_CASE("in-place forms: the gradient of an operand that is another part of the same tensor") {
  for (const Form& form : forms_for("operands")) {
    if (!form.binary) continue;
    std::mt19937 random = random_of(form.name);
    const Tensors leaves{filled({4, 3}, DType::f64, form.values, random).requires_grad_()};
    struct Parts {
      std::string name;
      int64_t to, from, rows;
    };
    for (const Parts& p :
         {Parts{"apart", 0, 2, 2}, Parts{"overlapping", 1, 0, 3}, Parts{"the same", 1, 1, 2}}) {
      const auto program = [&](const Tensors& x) {
        Tensor base = x[0] * 1.0, to = base.narrow(0, p.to, p.rows);
        form.call(to, base.narrow(0, p.from, p.rows));
        return base;
      };
      const auto reference = [&](const Arrays& x) {
        Array base = x[0];
        for_each_index({p.rows, 3}, [&](const Shape& i) {
          base({p.to + i[0], i[1]}) =
              form.f(x[0]({p.to + i[0], i[1]}), x[0]({p.from + i[0], i[1]}));
        });
        return base;
      };
      check_program(form.name + ", " + p.name, program, reference, leaves, random);
    }
  }
}

TEST_CASE(
    "in-place forms: a leaf that requires grad, and views of it, are refused but for no-grad") {
  for (const Form& form : forms_for("leaves")) {
    std::mt19937 random = random_of(form.name);
    Tensor leaf = filled({3, 4}, DType::f64, form.values, random).requires_grad_();
    const Tensor other = filled({}, DType::f64, form.values, random);
    const Array before = read(leaf);
    CHECK_THROWS_AS(form.call(leaf, other), AutogradError);
    Tensor row = leaf[1];
    CHECK_THROWS_AS(form.call(row, other), AutogradError);
    check_agree(form.name, leaf, before, 0);
    const NoGradGuard guard;
    form.call(leaf, other);
    check_agree(form.name, leaf, applied(form, before, read(other), DType::f64), 1e-12);
    CHECK(leaf.is_leaf());
    CHECK(leaf.requires_grad());
  }
}

TEST_CASE("in-place forms: backward of an op that kept the overwritten bytes is an AutogradError") {
  for (const Form& form : forms_for("kept bytes"))
    for (const Route& route : kRoutes) {
      std::mt19937 random = random_of(form.name);
      const Tensor leaf = filled({3, 4}, DType::f64, form.values, random).requires_grad_();
      Tensor kept = leaf * 1.0;
      const Tensor y = (kept * kept).sum();
      Tensor part = route.take(kept.detach());
      form.call(part, filled({}, DType::f64, form.values, random));
      CHECK_THROWS_AS(y.backward(), AutogradError);
    }
}
