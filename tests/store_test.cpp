// The TCP store: what it keeps, how long it waits, whom it lets in, and that strangers cannot hold
// it up. Ranks that die are real processes.
#include <doctest/doctest.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <random>

#include <lockstep/distributed/store.h>
#include <lockstep/distributed/store/data.h>
#include <lockstep/tensor/warning.h>

#include "ranks.h"
#include "sockets.h"
#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;
using sockets::connect_to;
using sockets::Listener;

namespace {

double seconds_of(const std::function<void()>& f) {
  const double begin = ranks::now();
  f();
  return ranks::now() - begin;
}

StoreOptions options(int rank, int size, int port, const std::string& token = "secret") {
  return {.port = port,
          .rank = rank,
          .size = size,
          .run_id = "job",
          .token = token,
          .timeout = Milliseconds(5000)};
}

}  // namespace

TEST_CASE("values") {
  Store server(options(0, 2, 0));
  CHECK(server.port() > 0);
  CHECK(server.where() == "127.0.0.1:" + std::to_string(server.port()));
  Store other(options(1, 2, server.port()));
  server.set("a", "1");
  CHECK(other.get("a") == "1");
  const std::string odd("\0\n\xff key", 7);
  other.set(odd, std::string("\0x\0", 3));
  CHECK(server.get(odd) == std::string("\0x\0", 3));
  CHECK(server.get_all({"a", odd, "a"}) ==
        std::vector<std::string>{"1", std::string("\0x\0", 3), "1"});
  CHECK(!server.try_get("b"));
  CHECK(server.set_once("b", "first") == "first");
  CHECK(other.set_once("b", "second") == "first");
  CHECK(other.try_get("b") == "first");
  CHECK(server.add("n", 5) == 5);
  CHECK(other.add("n", -7) == -2);
  CHECK(contains(error_of<DistError>([&] { other.add("b", 1); }), "no number"));
  CHECK(other.remove("b"));
  CHECK(!other.remove("b"));
  CHECK(!server.try_get("b"));
  const std::string large(1 << 20, 'x');
  other.set("large", large);
  CHECK(server.get("large") == large);
  CHECK(contains(error_of<DistError>([&] { server.set("large", large + "x"); }),
                 "at most 1048576 bytes"));
  CHECK(contains(error_of<DistError>([&] { server.set(std::string(1025, 'k'), ""); }),
                 "at most 1024 bytes"));
  server.set(std::string(1024, 'k'), "");
  CHECK(other.get(std::string(1024, 'k')).empty());
  CHECK(server.lost().empty());
}

TEST_CASE("it is bounded") {
  Store server(options(0, 1, 0));
  const std::string large(1 << 20, 'x');
  std::string error;
  for (int i = 0; i < 70 && error.empty(); ++i) try {
      server.set("k" + std::to_string(i), large);
    } catch (const DistError& e) {
      error = e.what();
      CHECK(i == 63);
    }
  CHECK(contains(error, "at most 64 MiB"));
  CHECK(server.remove("k7"));
  server.set("again", large);  // there is room again
  CHECK(server.get("again") == large);
}

TEST_CASE("what is not there is waited for") {
  Store server(options(0, 2, 0));
  Store other(options(1, 2, server.port()));
  std::thread late([&] {
    std::this_thread::sleep_for(Milliseconds(200));
    server.set("x", "there");
    std::this_thread::sleep_for(Milliseconds(200));
    server.add("y", 3);
  });
  // One call that waits holds up no other of the same rank.
  std::thread beside([&] { CHECK(other.get("y") == "3"); });
  CHECK(seconds_of([&] { CHECK(other.get("x") == "there"); }) > 0.15);
  other.wait({"x", "y"});
  late.join();
  beside.join();

  std::string error;
  const double took = seconds_of(
      [&] { error = error_of<DistError>([&] { other.get("missing", Milliseconds(1000)); }); });
  CHECK(took >= 1);
  CHECK(took < 1.5 * ranks::kPatience);
  CHECK(contains(error, "missing"));
  CHECK(contains(error, "127.0.0.1:" + std::to_string(server.port())));
  CHECK(contains(error_of<DistError>([&] {
                   other.wait({"x", "gone"}, Milliseconds(50));
                 }),
                 "\"gone\""));
}

// Five seconds are more than the shorter call's whole time.
TEST_CASE("each call has its own deadline") {
  Store server(options(0, 2, 0));
  Store other(options(1, 2, server.port()));
  std::atomic<bool> over = false;
  std::thread beats([&] {
    while (!over) other.set("heartbeat", "x");
  });
  std::thread tells([&] {
    while (!over) other.tell("pulse", "x"), std::this_thread::sleep_for(Milliseconds(1));
  });
  std::thread late([&] {
    std::this_thread::sleep_for(Milliseconds(5200));
    server.set("late", "there");
  });
  CHECK(other.get("late", std::chrono::seconds(60)) == "there");
  over = true;
  for (std::thread* t : {&beats, &tells, &late}) t->join();
  CHECK(server.lost().empty());
}

TEST_CASE("times without a limit") {
  StoreOptions unlimited = options(0, 2, 0);
  unlimited.timeout = Milliseconds::max();
  Store server(unlimited);
  unlimited.rank = 1;
  unlimited.port = server.port();
  Store other(unlimited);
  std::thread late([&] {
    std::this_thread::sleep_for(Milliseconds(100));
    server.set("x", "1");
    server.set("y", "2");
  });
  CHECK(other.get("x", Milliseconds::max()) == "1");
  CHECK(other.get("y") == "2");
  other.wait({"x"}, Milliseconds::max());
  CHECK(other.try_get("x", Milliseconds::max()) == "1");
  late.join();
}

TEST_CASE("many threads and clients at once") {
  Store server(options(0, 5, 0));
  std::vector<std::unique_ptr<Store>> clients;
  for (int r = 1; r < 5; ++r)
    clients.push_back(std::make_unique<Store>(options(r, 5, server.port())));
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      Store& store = *clients[static_cast<size_t>(t % 4)];
      for (int i = 0; i < 200; ++i) store.add("sum", t + 1);
    });
  for (std::thread& t : threads) t.join();
  CHECK(server.get("sum") == std::to_string(200 * 36));
}

TEST_CASE("nobody listens") {
  int port;
  { port = Listener().port(); }
  std::string error;
  StoreOptions o = options(1, 2, port);
  o.timeout = Milliseconds(1000);
  const double took = seconds_of([&] { error = error_of<DistError>([&] { Store store(o); }); });
  CHECK(took >= 1);
  CHECK(took < 1.5 * ranks::kPatience);
  CHECK(contains(error, "127.0.0.1:" + std::to_string(port)));
}

TEST_CASE("who does not come is named") {
  Store server(options(0, 2, 0));
  std::string error;
  const double took =
      seconds_of([&] { error = error_of<DistError>([&] { server.join(Milliseconds(1000)); }); });
  CHECK(took >= 1);
  CHECK(took < 1.5 * ranks::kPatience);
  CHECK(contains(error, "1/2 ranks joined within 1 s: rank 1 is missing"));
  CHECK(contains(error, server.where()));
}

TEST_CASE("ports") {
  int port;
  {
    Store first(options(0, 1, 0));
    port = first.port();
    double took = 0;
    CHECK(contains(
        error_of<DistError>([&] { took = seconds_of([&] { Store second(options(0, 1, port)); }); }),
        "in use"));
    CHECK(took < 1);
    Store client(options(0, 1, 0));
    CHECK(client.port() != port);
  }
  Store again(
      options(0, 1, port));  // right after it was closed, with connections that had been open
  CHECK(again.port() == port);
}

TEST_CASE("who is not of the job is refused") {
  Store server(options(0, 3, 0));
  const auto attempt = [&](const std::function<void(StoreOptions&)>& change) {
    StoreOptions o = options(1, 3, server.port());
    change(o);
    return error_of<DistError>([&] { Store store(o); });
  };
  const std::string wrong = attempt([](StoreOptions& o) { o.token = "guess"; });
  CHECK(contains(wrong, "refused"));
  CHECK(!contains(wrong, "job"));
  CHECK(contains(attempt([](StoreOptions& o) { o.token = ""; }), "refused"));
  CHECK(contains(attempt([](StoreOptions& o) { o.run_id = "another"; }), "run id here is \"job\""));
  CHECK(contains(attempt([](StoreOptions& o) { o.attempt = 1; }), "attempt 0"));
  CHECK(contains(attempt([](StoreOptions& o) { o.size = 2; }), "WORLD_SIZE differs"));
  Store one(options(1, 3, server.port()));
  CHECK(contains(attempt([](StoreOptions&) {}), "rank 1 (pid"));
  CHECK(contains(attempt([](StoreOptions&) {}), "is there already"));
  // A server that lacks the token is not believed either.
  StoreOptions o = options(0, 2, 0, "other");
  Store stranger(o);
  o = options(1, 2, stranger.port());
  CHECK(contains(error_of<DistError>([&] { Store store(o); }), "refused"));
}

TEST_CASE("a rank that leaves, and one that ends without a word") {
  Store server(options(0, 3, 0));
  { Store one(options(1, 3, server.port())); }
  for (int i = 0; i < 100 && server.lost().empty(); ++i)
    std::this_thread::sleep_for(Milliseconds(10));
  REQUIRE(server.lost().size() == 1);
  CHECK(server.lost()[0].left);
  CHECK(server.lost()[0].text() == "rank 1 has left");
  const int port = server.port();
  setenv("TEST_PORT", std::to_string(port).c_str(), 1);
  const auto ended = ranks::run_ranks(3, "rank: dies with a store", {.only = {2}});
  CHECK(ended[0].signal == SIGKILL);
  for (int i = 0; i < 100 && server.lost().size() < 2; ++i)
    std::this_thread::sleep_for(Milliseconds(10));
  REQUIRE(server.lost().size() == 2);
  const Store::Lost dead = server.lost()[1];
  CHECK(dead.rank == 2);
  CHECK(!dead.left);
  CHECK(dead.pid > 0);
  CHECK(contains(dead.text(), "rank 2 (pid " + std::to_string(dead.pid) + ") died"));
}

TEST_CASE("rank: dies with a store" * doctest::skip()) {
  Store store(options(2, 3, std::atoi(std::getenv("TEST_PORT"))));
  store.set("was", "here");
  raise(SIGKILL);
}

TEST_CASE("what is told without an answer is there soon, and costs nothing where nobody listens") {
  auto server = std::make_unique<Store>(options(0, 2, 0));
  Store other(options(1, 2, server->port()));
  const int descriptors = ranks::open_descriptors();
  for (int i = 0; i < 1000; ++i) other.tell("a", std::to_string(i));
  std::string seen;
  for (int i = 0; i < 500 && seen != "999"; ++i) {
    std::this_thread::sleep_for(Milliseconds(10));
    seen = server->get("a");
  }
  CHECK(seen == "999");
  CHECK(ranks::open_descriptors() <= descriptors + 4);  // one connection, and one for what waits
  std::string waited;
  std::thread waits([&] { waited = server->get("b", Milliseconds(20000)); });
  other.tell("b", "came");
  waits.join();
  CHECK(waited == "came");
  server.reset();
  CHECK(seconds_of([&] {
          for (int i = 0; i < 1000; ++i) other.tell("a", "b");
        }) < 1);
  CHECK(contains(error_of<DistError>([&] { other.set("a", "b"); }), "rank 0 has left"));
}

TEST_CASE("rank: stops with the server" * doctest::skip()) {
  Store store(options(0, 2, std::atoi(std::getenv("TEST_PORT"))));
  store.get("enough", Milliseconds(20000));
  raise(SIGSTOP);
}
TEST_CASE("a server that is stopped holds nobody up who only tells") {
  int port;
  { port = Listener().port(); }
  setenv("TEST_PORT", std::to_string(port).c_str(), 1);
  std::vector<ranks::Ended> ended;
  std::thread process([&] {
    ended = ranks::run_ranks(2, "rank: stops with the server", {.deadline = 1.5, .only = {0}});
  });
  Store store(options(1, 2, port));
  store.tell("a", "b");
  store.set("enough", "1");
  std::this_thread::sleep_for(Milliseconds(300));
  const std::string large(1000, 'x');
  CHECK(seconds_of([&] {  // more than any buffer takes
          for (int i = 0; i < 30000; ++i) store.tell("a", large);
        }) < 2 * ranks::kPatience);
  process.join();  // which kills it at the deadline
  CHECK(ended[0].hung);
}

TEST_CASE("the server leaves, or dies") {
  auto server = std::make_unique<Store>(options(0, 2, 0));
  Store other(options(1, 2, server->port()));
  std::string error;
  std::thread waits(
      [&] { error = error_of<DistError>([&] { other.get("never", Milliseconds(20000)); }); });
  std::this_thread::sleep_for(Milliseconds(100));
  CHECK(seconds_of([&] { server.reset(); }) < 1);
  waits.join();
  CHECK(contains(error, "rank 0 has left"));
  CHECK(contains(error_of<DistError>([&] { other.set("a", "b"); }), "rank 0 has left"));
  REQUIRE(other.lost().size() == 1);
  CHECK(other.lost()[0].left);

  int port;
  { port = Listener().port(); }
  setenv("TEST_PORT", std::to_string(port).c_str(), 1);
  std::vector<ranks::Ended> ended;
  std::thread process(
      [&] { ended = ranks::run_ranks(2, "rank: dies with the server", {.only = {0}}); });
  Store survivor(options(1, 2, port));
  const double begin = ranks::now();
  CHECK(contains(error_of<DistError>([&] { survivor.get("never", Milliseconds(20000)); }),
                 "rank 0 died"));
  CHECK(ranks::now() - begin < 3 * ranks::kPatience);
  CHECK(!survivor.lost().at(0).left);
  process.join();
}

TEST_CASE("rank: dies with the server" * doctest::skip()) {
  Store store(options(0, 2, std::atoi(std::getenv("TEST_PORT"))));
  store.join(Milliseconds(10000));
  std::this_thread::sleep_for(Milliseconds(200));
  raise(SIGKILL);
}

TEST_CASE("strangers get nothing and hold up nobody") {
  Store server(options(0, 2, 0));
  const int port = server.port();
  server.set("secret", "value");
  std::mt19937 random(5);
  std::vector<int> open;
  for (int i = 0; i < 200; ++i) open.push_back(connect_to(port));
  std::string heard;
  for (size_t i = 0; i < open.size(); ++i) {
    REQUIRE(open[i] >= 0);
    std::string noise;
    switch (i % 5) {
      case 0:  // says nothing
        break;
      case 1:
        for (int k = 0; k < 300; ++k) noise += static_cast<char>(random());
        break;
      case 2:
        noise = "\xff\xff\xff\xff then what";  // four gigabytes are coming
        break;
      case 3:
        noise = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        break;
      default:
        noise = std::string("\x10\0\0\0", 4) + "short";  // and no more
    }
    if (!noise.empty()) send(open[i], noise.data(), noise.size(), MSG_NOSIGNAL);
  }
  // Meanwhile it serves its own.
  const double took = seconds_of([&] {
    Store other(options(1, 2, port));
    CHECK(other.get("secret") == "value");
    for (int i = 0; i < 100; ++i) other.add("n", 1);
    CHECK(server.get("n") == "100");
  });
  CHECK(took < 2 * ranks::kPatience);
  for (size_t i = 0; i < open.size(); ++i) {
    heard += sockets::read_for(open[i], i < 5 ? 200 : 0);
    close(open[i]);
  }
  CHECK(contains(heard, "Lockstep"));  // the challenge, which says no more
  CHECK(!contains(heard, "value"));
  CHECK(heard.size() <= 200 * 42);
  // A silent one is sent away; the store sleeps, and still serves.
  const int silent = connect_to(port);
  CHECK(sockets::read_for(silent, 8000 * ranks::kPatience, true).size() == 42);
  close(silent);
  CHECK(server.get("secret") == "value");
}

TEST_CASE("an idle server sleeps") {
  Store server(options(0, 1, 0));
  const auto used = [] {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  };
  const double before = used();
  std::this_thread::sleep_for(Milliseconds(500));
  CHECK(used() - before < 0.05);
}

TEST_CASE("bytes that are no request are none") {
  std::mt19937 random(3);
  StoreRequest good{.op = store_wire::Op::set, .keys = {"key"}, .value = "value"};
  const std::string frame = request_frame(good).substr(4);
  REQUIRE(read_request(frame));
  CHECK(read_request(frame)->keys == good.keys);
  CHECK(read_request(frame)->value == good.value);
  for (size_t n = 0; n < frame.size(); ++n) CHECK(!read_request(frame.substr(0, n)));
  CHECK(!read_request(frame + "x"));
  int taken = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bad = frame;
    for (int k = 0; k < 3; ++k) bad[random() % bad.size()] = static_cast<char>(random());
    if (const auto r = read_request(bad)) {
      ++taken;
      CHECK(r->value.size() <= frame.size());
      CHECK(r->keys.size() <= frame.size());
    }
  }
  CHECK(taken > 0);
  CHECK(taken < 20000);
}
