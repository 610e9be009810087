// The end of a group: work in flight is completed by destroy, by dropping the last handle and at the end of
// the program, cut off by abort alone; and what is asked of a group that is gone is an error. A group ends
// without harm to the groups beside it.
#include "cases.h"

#include <cstdlib>

namespace {

using namespace cases;

constexpr int kMany = 100;

/// Collectives of many sizes and kinds under way, none of them waited for.
struct Flight {
  std::vector<Tensor> sums, copies, rows;
  std::vector<dist::WorkPtr> works;

  Flight(const Group& g, bool keep, int first = 0, int last = kMany) {
    for (int k = first; k < last; ++k) {
      const int64_t n = 1 + 501 * (k % 7);
      sums.push_back(full({n}, k + g.rank()));
      copies.push_back(full({n}, 10 * k + g.rank()));
      rows.push_back(zeros({g.size(), n}));
      auto add = [&](dist::WorkPtr w) {
        if (keep) works.push_back(std::move(w));
      };
      add(g.all_reduce_async(sums.back()));
      if (k % 3 == 0) add(g.broadcast_async(copies.back(), k % g.size()));
      if (k % 5 == 0) add(g.all_gather_async(rows.back(), full({n}, k + g.rank())));
      if (k % 11 == 0) add(g.barrier_async());
    }
  }
  void check(const Group& g, int first = 0) const {
    for (size_t i = 0; i < sums.size(); ++i) {
      const int k = first + static_cast<int>(i), size = g.size();
      const auto all_are = [k](const Tensor& t, double want, const char* what) {
        for (const double v : t.to_vector<double>())
          require(v == want, str_cat(what, " ", k, ": got ", v, ", want ", want));
      };
      all_are(sums[i], size * k + size * (size - 1) / 2, "sum");
      if (k % 3 == 0) all_are(copies[i], 10 * k + k % size, "broadcast");
      for (int r = 0; r < size && k % 5 == 0; ++r) all_are(rows[i][r], k + r, "row");
    }
  }
};

void destroy_at_once(Group g) {
  for (const bool keep : {true, false})
    for (int late = -1; late < g.size(); ++late) {  // a rank that issues the second half later
      const Group own(g.process_group().child());
      Flight first(own, keep, 0, kMany / 2);
      if (g.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      Flight second(own, keep, kMany / 2);
      own.destroy();
      first.check(g);
      second.check(g, kMany / 2);
      for (const auto& w : second.works) {
        require(w->is_completed() && !w->exception(), "destroy left work behind");
        w->wait();
      }
      own.destroy();  // again
    }
  g.barrier();
}

/// The last handle does what destroy does, and works may live longer than their group.
void drop_the_handle(Group g) {
  std::vector<dist::WorkPtr> works;
  std::optional<Flight> flight;
  {
    const Group own(g.process_group().child());
    flight.emplace(own, true);
  }
  flight->check(g);
  for (const auto& w : flight->works) w->wait();
  g.barrier();
}

void use_after_destroy(Group g) {
  const Group own(g.process_group().child());
  own.destroy();
  refuses(g, {"all_reduce(sum) of f32 [3]", "destroyed"}, [&] { own.all_reduce(ones({3})); });
  refuses(g, {"barrier", "destroyed"}, [&] { own.barrier(); });
  refuses(g, {"destroyed"}, [&] { own.process_group().child(); });
  refuses(g, {"destroyed"}, [&] { DistributedDataParallel net{Scalar{}, own}; });
}

/// A peer that has said goodbye is an error for what still needs it, at once.
void use_after_a_goodbye(Group g) {
  for (int leaver = 0; leaver < g.size(); ++leaver) {
    const Group own(g.process_group().child());
    own.barrier();
    if (g.rank() == leaver) {
      own.destroy();
    } else {
      const double begin = ranks::now();
      std::string text = "no error";
      try {
        own.all_reduce(ones({3}));
      } catch (const DistError& e) {
        text = e.what();
      }
      for (const std::string& part :
           {str_cat("rank ", leaver, " has left"), std::string("all_reduce(sum) of f32 [3]"),
            std::string("sequence number 2"), std::string("last completed: barrier")})
        require(contains(text, part), "\"" + text + "\" lacks " + part);
      require(ranks::now() - begin < 2.0 * ranks::kPatience, "the news came late");
    }
    g.barrier();
  }
}

/// One rank aborts while everybody has work under way.
void abort_on_one_rank(Group g) {
  for (int aborter = 0; aborter < g.size(); ++aborter) {
    const Group own(g.process_group().child());
    const Tensor before = full({5}, g.rank() + 1.0);
    own.all_reduce(before);
    std::string text = "no error";
    const double begin = ranks::now();
    try {
      if (g.rank() == aborter) own.process_group().abort("enough of this");
      Flight flight(own, true);
      for (const auto& w : flight.works) w->wait();
    } catch (const DistError& e) {
      text = e.what();
    }
    require(contains(text, "enough of this") && contains(text, str_cat("rank ", aborter)), text);
    require(ranks::now() - begin < 2.0 * ranks::kPatience, "abort freed the ranks late");
    require(before.to_vector<double>() == std::vector<double>(5, g.size() * (g.size() + 1) / 2),
            "what was complete before");
    own.destroy();
    g.barrier();
  }
}

/// An exception on its way out ends the group that it leaves, for everybody, at once.
void left_by_an_exception(Group g) {
  const double begin = ranks::now();
  std::string text = "no error";
  try {
    const Group own(g.process_group().child());
    if (g.rank() == 0) {
      own.all_reduce_async(ones({3}));  // which nobody joins
      throw ValueError("rank 0 gave up");
    }
    own.barrier();
  } catch (const Error& e) {
    text = e.what();
  }
  require(contains(text, g.rank() == 0 ? "gave up" : "rank 0"), text);
  require(ranks::now() - begin < 2.0 * ranks::kPatience, "the others were freed late");
  g.barrier();
}

struct Watched : nn::Module {  // w x, and what a test does there
  nn::Parameter w{f64(10)};
  std::function<void()> in_forward = [] {};
  Tensor forward(Tensor x) {
    in_forward();
    return w * x;
  }
  LOCKSTEP_MODULE(Watched, w)
};

/// ... also from a wrapper's forward; then the others read what it was, whatever they wait for.
void left_by_a_forward(Group g) {
  for (const bool in_ddp : {true, false})
    for (int thrower = 0; thrower < g.size(); ++thrower) {
      const double begin = ranks::now();
      std::string text = "no error";
      try {
        const Group own(g.process_group().child());
        Watched module;
        DistributedDataParallel net{module, own};
        net(f64(1)).backward();
        if (g.rank() == thrower)
          module.in_forward = [&] { throw ValueError(str_cat("rank ", thrower, " saw red")); };
        if (g.rank() == thrower || in_ddp)
          net(f64(1)).backward();
        else
          own.barrier();
      } catch (const Error& e) {
        text = e.what();
      }
      require(contains(text, str_cat("rank ", thrower, " saw red")), text);
      if (g.rank() != thrower)
        for (const std::string& part : {str_cat("aborted by rank ", thrower),
                                        std::string("the last one its forward threw: ")})
          require(contains(text, part), "\"" + text + "\" lacks " + part);
      require(ranks::now() - begin < 2.0 * ranks::kPatience, "the others were freed late");
      g.barrier();
    }
}

/// An exception that was dealt with is not named when another one ends the group.
void a_forward_that_recovered(Group g) {
  std::string text = "no error";
  try {
    const Group own(g.process_group().child());
    Watched module;
    DistributedDataParallel net{module, own};
    module.in_forward = [] { throw ValueError("a passing fault"); };
    refuses(g, {"a passing fault"}, [&] { net(f64(1)); });
    module.in_forward = [] {};
    net(f64(1)).backward();
    if (g.rank() == 1) throw ValueError("rank 1 gave up");
    net(f64(1)).backward();
  } catch (const Error& e) {
    text = e.what();
  }
  require(contains(text, g.rank() == 1 ? "gave up" : "aborted by rank 1"), text);
  require(!contains(text, "passing fault"), text);
  g.barrier();
}

/// A goodbye reaches the communicators of wrappers that still live: peers that train learn at once who has
/// left, and the wrapper says what is wrong with it.
void destroyed_under_a_wrapper(Group g) {
  for (int leaver = 0; leaver < g.size(); ++leaver)
    for (const bool group_first : {true, false}) {
      std::optional<Group> own(Group(g.process_group().child()));
      std::optional<DistributedDataParallel<Scalar>> net(std::in_place, Scalar{}, *own);
      (*net)(f64(g.rank() + 1.0)).backward();
      const auto text_of = [&](const std::function<void()>& f) -> std::string {
        try {
          f();
        } catch (const DistError& e) {
          return e.what();
        }
        return "no error";
      };
      if (g.rank() == leaver) own->destroy();
      const double begin = ranks::now();
      const std::string text = text_of([&] { (*net)(f64(1)).backward(); });
      const std::string part =
          g.rank() == leaver ? "was destroyed on this rank" : str_cat("rank ", leaver, " has left");
      require(contains(text, part), "\"" + text + "\" lacks " + part);
      require(contains(text, "DDP bucket 0 (w)"), "\"" + text + "\" names no bucket");
      require(ranks::now() - begin < 2.0 * ranks::kPatience, "the news came late");
      require(!net->module().w.grad().defined(), "a gradient is left after the error");
      if (g.rank() == leaver) {
        require(contains(text_of([&] { net->reduce_now(); }), part), "reduce_now after destroy");
        require((*net)(f64(2)).item<double>() == 20, "forward needs nobody");
        own->process_group().abort("which nobody hears any more");
      }
      group_first ? own.reset() : net.reset();
      g.barrier();
    }
}

/// The program ends with work under way, and says nothing.
void no_destroy(Group g) {
  static Flight flight(g, true);
  static DistributedDataParallel net{Scalar{}, g};
  net(f64(g.rank() + 1.0)).backward();
  near(net.module().w.grad().item<double>(), (g.size() + 1) / 2.0, "a step");
  std::exit(0);
}

/// A wrapper and its module live longer than the group.
void wrapper_outlives_group(Group g) {
  std::optional<Group> own(Group(g.process_group().child()));
  DistributedDataParallel net{Scalar{}, *own};
  net(f64(g.rank() + 1.0)).backward();
  own->destroy();
  own.reset();
  g.barrier();
  near(net.module().w.grad().item<double>(), (g.size() + 1) / 2.0, "the gradient");
  require(net.state_dict().size() == 1 && net.module().w.item<double>() == 10, "the module");
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  static const std::vector<Case> list{
      {"destroy with a hundred collectives under way", 2, destroy_at_once},
      {"destroy with a hundred collectives under way on three ranks", 3, destroy_at_once},
      {"the last handle goes with a hundred collectives under way", 3, drop_the_handle},
      {"a destroyed group is used", 2, use_after_destroy},
      {"a group that a rank has left is used", 3, use_after_a_goodbye},
      {"one rank aborts", 3, abort_on_one_rank},
      {"an exception leaves a group", 3, left_by_an_exception},
      {"an exception of a forward leaves a group", 3, left_by_a_forward},
      {"a forward that recovered", 2, a_forward_that_recovered},
      {"a group destroyed under a living wrapper", 3, destroyed_under_a_wrapper},
      {.name = "no destroy at all",
       .size = 3,
       .body = no_destroy,
       .threads = false,
       .silent = true},
      {"a wrapper that outlives its group", 2, wrapper_outlives_group},
  };
  return list;
}
