// Operation's waiting and its ends.
#include <lockstep/distributed/shm/operation.h>

#include <lockstep/distributed/failure_note.h>
#include <lockstep/distributed/shm/communicator.h>

namespace lockstep::dist {

Operation::Operation(std::shared_ptr<Communicator> communicator, const Call& call, Collective what)
    : communicator_(std::move(communicator)),
      rank_(communicator_->rank()),
      size_(communicator_->size()),
      call_(call),
      what_(std::move(what)),
      chunk_elements_(static_cast<int64_t>(kChunkBytes / size_of(call_.dtype))),
      timeout_(what_.options.timeout.count() > 0 ? what_.options.timeout
                                                 : communicator_->timeout()),
      deadline_(deadline_after(timeout_)) {}

const SharedArea& Operation::area() const { return communicator_->area(); }

void Operation::wait(Milliseconds timeout) {
  communicator_->check_here(name_of(what_.kind));
  if (timeout.count() > 0) {
    std::lock_guard lock(communicator_->engine().mutex());
    if (deadline_after(timeout) < deadline_) {
      deadline_ = deadline_after(timeout);
      timeout_ = timeout;
    }
  }
  communicator_->wait_for([this] { return over(); }, [this] { return obstacle(); });
  if (failed()) {
    note_failed_peer();
    std::rethrow_exception(error_);
  }
  run_then();
}

bool Operation::is_completed() {
  communicator_->check_here(name_of(what_.kind));
  if (!over()) communicator_->engine().progress();
  return over();
}

void Operation::complete() {
  if (what_.deliver) what_.deliver();
  enter(State::complete);
}

void Operation::fail(const Ending& why) {
  error_ = std::make_exception_ptr(PeerError(why.cause, why.text));
  enter(State::failed);
}

Obstacle Operation::obstacle() const {
  return communicator_->obstacle(named().text(), not_called());
}

std::string Operation::deadline_text() const {
  const std::vector<int> absent = missing();
  const std::vector<int> late = absent.empty() ? lagging() : absent;
  std::string who = "all ranks", calls;
  for (size_t i = 0; i < late.size(); ++i) {
    who = i == 0 ? str_cat(late.size() > 1 ? "ranks " : "rank ", late[i])
                 : str_cat(who, ", ", late[i]);
    if (i < 16) calls += str_cat("; ", communicator_->standing(late[i]));
  }
  return str_cat(who, absent.empty() ? " arrived and did not go on" : " did not arrive", " within ",
                 timeout_.count(), " ms (rank ", rank_, " waited in ", named().text(), ")", calls);
}

}  // namespace lockstep::dist
