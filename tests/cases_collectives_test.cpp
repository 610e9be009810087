// Every collective, waited for at once and all under way together: the right values, or an exception on the
// thread that called or waits; never a hang, and never an exception lost in some other thread. Expected
// numbers are worked by hand.
#include "cases.h"

namespace {

using namespace cases;
using dist::ProcessGroup, dist::ReduceOp, dist::WorkPtr;

/// A collective under way, and what must be true when it is complete.
struct Started {
  WorkPtr work;
  std::function<void()> check;
};
struct Kind {
  std::string name;
  std::function<Started(ProcessGroup&)> start;
};

void holds(const Tensor& t, const std::vector<double>& want, const std::string& what) {
  require(t.to_vector<double>() == want, what + ": " + t.to_string());
}
Tensor pair_of(double a, double b) { return tensor(std::vector<double>{a, b}); }

/// Rank r gives [r, 10 r] and the like.
std::vector<Kind> kinds() {
  const auto sum = [](int size) { return size * (size - 1) / 2.0; };
  return {
      {"all_reduce",
       [=](ProcessGroup& g) -> Started {
         const Tensor t = pair_of(g.rank(), 10 * g.rank());
         const int w = g.size();
         return {g.all_reduce(t), [=] { holds(t, {sum(w), 10 * sum(w)}, "all_reduce"); }};
       }},
      {"broadcast",
       [](ProcessGroup& g) -> Started {
         const Tensor t = pair_of(g.rank(), 5);
         const int root = g.size() - 1;
         return {g.broadcast(t, root), [=] { holds(t, {double(root), 5}, "broadcast"); }};
       }},
      {"reduce",
       [=](ProcessGroup& g) -> Started {
         const Tensor t = pair_of(g.rank(), 1);
         const int w = g.size(), r = g.rank();
         return {g.reduce(t, w - 1, ReduceOp::max), [=] {
                   holds(t,
                         r == w - 1 ? std::vector<double>{w - 1.0, 1}
                                    : std::vector<double>{double(r), 1},
                         "reduce");
                 }};
       }},
      {"all_gather",
       [](ProcessGroup& g) -> Started {
         const int w = g.size();
         std::vector<Tensor> out;
         for (int r = 0; r < w; ++r) out.push_back(pair_of(-1, -1));
         return {g.all_gather(out, pair_of(g.rank(), 7)), [=] {
                   for (int r = 0; r < w; ++r)
                     holds(out[static_cast<size_t>(r)], {double(r), 7}, "all_gather");
                 }};
       }},
      {"reduce_scatter",
       [=](ProcessGroup& g) -> Started {
         const int w = g.size(), r = g.rank();
         std::vector<Tensor> in;
         for (int k = 0; k < w; ++k) in.push_back(pair_of(r, k));
         const Tensor out = pair_of(-1, -1);
         return {g.reduce_scatter(out, in), [=] {
                   holds(out, {sum(w), double(w * r)}, "reduce_scatter");
                 }};
       }},
      {"gather",
       [](ProcessGroup& g) -> Started {
         const int w = g.size();
         std::vector<Tensor> out;
         for (int r = 0; g.rank() == 0 && r < w; ++r) out.push_back(pair_of(-1, -1));
         return {g.gather(out, pair_of(g.rank(), 3), 0), [=] {
                   for (size_t r = 0; r < out.size(); ++r) holds(out[r], {double(r), 3}, "gather");
                 }};
       }},
      {"scatter",
       [](ProcessGroup& g) -> Started {
         const int w = g.size(), r = g.rank();
         std::vector<Tensor> in;
         for (int k = 0; r == w - 1 && k < w; ++k) in.push_back(pair_of(k, 4));
         const Tensor out = pair_of(-1, -1);
         return {g.scatter(out, in, w - 1), [=] { holds(out, {double(r), 4}, "scatter"); }};
       }},
      {"all_to_all",
       [](ProcessGroup& g) -> Started {
         const int w = g.size(), r = g.rank();
         std::vector<Tensor> in, out;
         for (int k = 0; k < w; ++k) in.push_back(pair_of(r, k)), out.push_back(pair_of(-1, -1));
         return {g.all_to_all(out, in), [=] {
                   for (int k = 0; k < w; ++k)
                     holds(out[static_cast<size_t>(k)], {double(k), double(r)}, "all_to_all");
                 }};
       }},
      {"send and recv",
       [](ProcessGroup& g) -> Started {
         const int w = g.size(), from = (g.rank() + w - 1) % w;
         const Tensor out = pair_of(-1, -1);
         const WorkPtr sent = g.send(pair_of(g.rank(), 6), (g.rank() + 1) % w);
         return {g.recv(out, from), [=] {
                   sent->wait();
                   holds(out, {double(from), 6}, "recv");
                 }};
       }},
      {"barrier",
       [](ProcessGroup& g) -> Started {
         return {g.barrier(), [] {}};
       }},
  };
}

void every_kind(Group g) {
  ProcessGroup& group = g.process_group();
  for (const Kind& k : kinds()) {
    const Started s = k.start(group);
    s.work->wait();
    require(s.work->is_completed() && !s.work->exception(), k.name + " is not complete");
    s.check();
  }
  for (const bool backwards : {false, true}) {  // in which order they are waited for
    std::vector<Started> all;
    for (int times = 0; times < 3; ++times)
      for (const Kind& k : kinds()) all.push_back(k.start(group));
    if (backwards) std::reverse(all.begin(), all.end());
    for (const Started& s : all) {
      s.work->wait();
      s.check();
    }
  }
  // By asking, without waiting.
  for (const Kind& k : kinds()) {
    const Started s = k.start(group);
    while (!s.work->is_completed()) std::this_thread::yield();
    s.check();
  }
}

/// Each kind alone on a group that a rank has left: the exception reaches whoever waits, and stays in the work.
void every_kind_without_a_peer(Group g) {
  for (const Kind& k : kinds()) {
    const Group own(g.process_group().child());
    own.barrier();
    if (g.rank() == 1) {
      own.destroy();
    } else {
      std::string text = "no error";
      const double begin = ranks::now();
      std::optional<Started> s;
      try {
        s = k.start(own.process_group());
        s->work->wait();
      } catch (const DistError& e) {
        text = e.what();
      }
      // Rank 0 of two sends to rank 1 and receives from it; gather and scatter have their roots.
      require(contains(text, "rank 1 has left"), k.name + ": " + text);
      require(ranks::now() - begin < 2.0 * ranks::kPatience, k.name + ": the news came late");
      if (s) {
        require(s->work->is_completed() && s->work->exception(),
                k.name + " looks as if it goes on");
        bool again = false;
        try {
          s->work->wait();
        } catch (const DistError&) {
          again = true;
        }
        require(again, k.name + ": a second wait returns");
      }
    }
    g.barrier();
  }
}

/// What makes no sense, or has no meaning for a dtype, throws on the caller, at once, on every rank.
void senseless(Group g) {
  ProcessGroup& group = g.process_group();
  const Tensor whole = ones({4}, {.dtype = DType::i64}), t = ones({4}), undefined;
  refuses(g, {"avg"}, [&] { group.all_reduce(whole, ReduceOp::avg); });
  refuses(g, {"band"}, [&] { group.all_reduce(t, ReduceOp::band); });
  refuses(g, {"broadcast", "root"}, [&] { group.broadcast(t, g.size()); });
  refuses(g, {"broadcast", "root"}, [&] { group.broadcast(t, -1); });
  refuses(g, {"all_gather"}, [&] { group.all_gather(std::vector<Tensor>{t}, t); });
  refuses(g, {"all_gather"}, [&] { group.all_gather(ones({3}), t); });
  refuses(g, {"reduce_scatter"}, [&] { group.reduce_scatter(t, ones({5})); });
  refuses(g, {"scatter"}, [&] { group.scatter(t, std::vector<Tensor>{t}, g.rank()); });
  refuses(g, {"all_to_all"}, [&] { group.all_to_all(t, ones({5})); });
  refuses(g, {"send"}, [&] { group.send(t, g.rank()); });
  refuses(g, {"recv"}, [&] { group.recv(t, g.size()); });
  refuses(g, {"all_reduce"}, [&] { group.all_reduce(ones({1}).expand({4})); });
  refuses(g, {"undefined"}, [&] { group.all_reduce(undefined); });
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  static const std::vector<Case> list{
      {"every kind on two ranks", 2, every_kind},
      {"every kind on three ranks", 3, every_kind},
      {"every kind without a peer", 2, every_kind_without_a_peer},
      {"what makes no sense", 2, senseless},
      {"what makes no sense on three ranks", 3, senseless},
  };
  return list;
}
