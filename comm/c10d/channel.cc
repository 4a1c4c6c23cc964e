// See channel.h.
#include "comm/c10d/channel.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "comm/c10d/internal.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus::c10d_internal {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// ---- Tags. Bit 30 is set in all tags of annulus, which leaves the tags below 2^30 to the program's own sends and
// receives; the backend's collectives have a different kind of tag. Below bit 30 are 16 bits for the context, 2 for the
// lane and 12 for the stream: 2^30 + 2^14 + 2^12 for context 1, Lane::kHeaders and stream 0. gloo keeps the order of
// messages with the same tag between two ranks.

constexpr int64_t kStreams = 4096;  // of a lane

int tag_of(int64_t context, Stream stream) {
  const int64_t number = context == 0 ? 0 : 1 + (context - 1) % 0xffff;
  return (1 << 30) | static_cast<int>(number) << 14 | static_cast<int>(stream.lane) << 12 |
         static_cast<int>(stream.number % kStreams);
}

// Stream 0 of Lane::kExchange has the frames; the others follow from the number of the message.
int tag_of_payload(int64_t context, int64_t number) {
  return tag_of(context, {Lane::kExchange, 1 + number % (kStreams - 1)});
}

// ---- The frame that is sent before a message; it contains the message if that is short.

struct Frame {
  static constexpr int64_t kInside = 4096 - 24;
  int64_t bytes = 0;
  int64_t number = 0;
  int64_t dtype = 0;
  std::array<char, kInside> inside;  // the first `bytes` of these are sent, if they fit
};
static_assert(sizeof(Frame) == 4096);
constexpr int64_t kFrameHead = sizeof(Frame) - Frame::kInside;

at::Tensor as_bytes(void* data, int64_t bytes) { return at::from_blob(data, {bytes}, at::kByte); }

// ---- The threads that wait for messages.

class Waiters {
 public:
  void run(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    if (static_cast<int64_t>(jobs_.size()) > idle_) {
      try {
        std::thread([this] { loop(); }).detach();
      } catch (const std::system_error& e) {
        jobs_.pop_back();
        throw Error(ErrorKind::kComm, "comm",
                    std::string("no thread could be started to wait for a message (") + e.what() +
                        "); every message under way needs one: raise the limit of processes (ulimit -u, pids.max)");
      }
    } else {
      wake_.notify_one();
    }
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [&] { return !jobs_.empty(); });
      --idle_;
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  int64_t idle_ = 0;
};

// Never destroyed, because threads may still wait when the process ends.
Waiters& waiters() {
  static auto& waiters = *new Waiters;
  return waiters;
}

struct Posted final : Transfer {
  Kept kept;
  void* data = nullptr;
  std::vector<WorkPtr> works;  // in the order in which they are waited for; a waiting thread may add more
  std::unique_ptr<Frame> frame;
  bool abandoned = false;
};
using PostedPtr = std::shared_ptr<Posted>;

void abort(const WorkPtr& work) {
  try {
    work->abort();
  } catch (const c10::Error&) {  // not every backend supports it; the thread then continues to wait
  }
}

// Adds `work` to those that are waited for. Returns false if the transfer has been abandoned.
bool add(Posted& posted, const WorkPtr& work) {
  const std::lock_guard lock(arrivals().mutex);
  posted.works.push_back(work);
  if (posted.abandoned) abort(work);
  return !posted.abandoned;
}

// Returns false if the work was aborted.
bool await(const WorkPtr& work) {
  // wait() without a timeout would use the group's timeout, which breaks the connections when it expires.
  constexpr std::chrono::milliseconds kForEver = std::chrono::hours(24 * 365);
  return work->wait(kForEver);
}

// Runs `body`, which waits, on a thread. The transfer is done if it returns true.
template <typename Body>
void complete_by(const PostedPtr& posted, Body body) {
  const auto wait = [posted, body = std::make_shared<Body>(std::move(body))]() mutable {
    bool done = false;
    std::string failure;
    try {
      done = (*body)(*posted);
    } catch (const std::exception& e) {
      failure = in_short(e);
    }
    // Release the references to the group before notifying: the process may end after that, and this thread must not be
    // the last owner of objects that belong to Python.
    body.reset();
    const std::lock_guard lock(arrivals().mutex);
    posted->done = done;
    if (!failure.empty()) posted->failure = std::move(failure);
    if (done) {
      posted->works.clear();
      posted->kept = nullptr;
    }
    arrivals().arrived.notify_all();
  };
  try {
    waiters().run(wait);
  } catch (const Error&) {
    [[maybe_unused]] const auto* leaked = new PostedPtr(posted);  // the backend may still write to it
    for (const WorkPtr& work : posted->works) abort(work);
    throw;
  }
}

bool await_all(Posted& posted) {
  // A send posts all its works at the start, so `works` does not change any more.
  const std::vector<WorkPtr> works = posted.works;
  return std::all_of(works.begin(), works.end(), await);
}

PostedPtr new_transfer(bool is_send, const Channel::Address& address, void* data, int64_t bytes, Kept kept) {
  auto posted = std::make_shared<Posted>();
  posted->peer = address.peer;
  posted->is_send = is_send;
  posted->bytes = bytes;
  posted->data = data;
  posted->kept = std::move(kept);
  return posted;
}

}  // namespace

struct Channel::Group {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  BackendPtr backend;

  WorkPtr start(bool is_send, int rank, int tag, void* data, int64_t bytes) const {
    std::vector<at::Tensor> tensors{as_bytes(data, bytes)};
    try {
      return is_send ? backend->send(tensors, rank, tag) : backend->recv(tensors, rank, tag);
    } catch (const std::exception& e) {
      throw Error(ErrorKind::kComm, "comm", in_short(e));
    }
  }
};

std::string in_short(const std::exception& e) {
  const std::string text = e.what(), line = text.substr(0, text.find('\n'));
  const size_t begin = line.rfind('[', 0) == 0 ? line.find("] ") + 2 : 0;
  const size_t address = line.find("]:", begin);  // the address of a peer, which advice follows
  const size_t end = address == std::string::npos ? address : line.find('.', address);
  return begin < line.size() ? line.substr(begin, end - begin) : "the process group gives no reason";
}

Arrivals& arrivals() {
  static auto& arrivals = *new Arrivals;
  return arrivals;
}

namespace {

using ContextsOfAll =
    std::map<const c10d::ProcessGroup*,
             std::pair<c10::weak_intrusive_ptr<c10d::ProcessGroup>, std::shared_ptr<Channel::Contexts>>>;

// Guarded by arrivals().mutex.
ContextsOfAll& contexts_of_all() {
  static auto& all = *new ContextsOfAll;
  return all;
}

std::shared_ptr<Channel::Contexts> contexts_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  forget_ended_groups();
  const std::lock_guard lock(arrivals().mutex);
  return contexts_of_all().try_emplace(group.get(), group, std::make_shared<Channel::Contexts>()).first->second.second;
}

}  // namespace

void forget_ended_groups() {
  // Destroyed after the lock is released, because the destructor of a group waits for the group's threads.
  std::vector<ContextsOfAll::mapped_type> ended;
  const std::lock_guard lock(arrivals().mutex);
  std::erase_if(contexts_of_all(), [&](auto& entry) {
    if (!entry.second.first.expired()) return false;
    ended.push_back(std::move(entry.second));
    return true;
  });
}

Channel::Channel(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : group_(std::make_shared<Group>()),
      contexts_(contexts_of(group)),
      name_(group->getGroupName()),
      rank_(group->getRank()) {
  group_->group = group;
  try {
    group_->backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const c10::Error&) {
    throw Error(ErrorKind::kUsage, "comm",
                "the process group \"" + name_ +
                    "\" has no backend for CPU tensors, which the ranks use to agree: make it with gloo beside its "
                    "other backends, as with init_process_group(\"cpu:gloo,cuda:nccl\")");
  }
  in_job_.resize(static_cast<size_t>(group->getSize()));
  std::vector<uint64_t> global;
  try {
    global = group_->backend->getBackendOptions()->global_ranks_in_group;
  } catch (const c10::Error&) {  // a backend without options: messages use the ranks of the group
  }
  for (size_t i = 0; i < in_job_.size(); ++i) {
    in_job_[i] = static_cast<int>(global.size() == in_job_.size() ? global[i] : i);
  }
}

TransferPtr Channel::start(bool is_send, const Address& address, int tag, void* data, int64_t bytes, Kept kept) {
  auto posted = new_transfer(is_send, address, data, bytes, std::move(kept));
  posted->works.push_back(group_->start(is_send, address.rank, tag, data, bytes));
  complete_by(posted, await_all);
  return posted;
}

TransferPtr Channel::send(const Address& to, Stream stream, const void* data, int64_t bytes, Kept kept) {
  return start(true, to, tag_of(to.context, stream), const_cast<void*>(data), bytes, kept);
}

TransferPtr Channel::receive(const Address& from, Stream stream, void* data, int64_t bytes, Kept kept) {
  return start(false, from, tag_of(from.context, stream), data, bytes, std::move(kept));
}

TransferPtr Channel::send(const Address& to, const Described& message) {
  const auto bytes = static_cast<int64_t>(message.tensor.nbytes());
  void* data = const_cast<void*>(message.tensor.const_data_ptr());
  auto posted = new_transfer(true, to, data, bytes, std::make_shared<at::Tensor>(message.tensor));
  posted->frame = std::make_unique<Frame>();
  posted->frame->bytes = bytes;
  posted->frame->number = message.number;
  posted->frame->dtype = static_cast<int64_t>(message.tensor.scalar_type());
  const bool inside = bytes <= Frame::kInside;
  if (inside) std::memcpy(posted->frame->inside.data(), data, static_cast<size_t>(bytes));
  posted->works.push_back(group_->start(true, to.rank, tag_of(to.context, {Lane::kExchange}), posted->frame.get(),
                                        kFrameHead + (inside ? bytes : 0)));
  if (!inside) {
    posted->works.push_back(group_->start(true, to.rank, tag_of_payload(to.context, message.number), data, bytes));
  }
  complete_by(posted, await_all);
  return posted;
}

TransferPtr Channel::receive(const Address& from, const Described& message) {
  const auto bytes = static_cast<int64_t>(message.tensor.nbytes());
  auto posted =
      new_transfer(false, from, message.tensor.mutable_data_ptr(), bytes, std::make_shared<at::Tensor>(message.tensor));
  posted->expected = describe_message(message);
  posted->frame = std::make_unique<Frame>();
  posted->works.push_back(
      group_->start(false, from.rank, tag_of(from.context, {Lane::kExchange}), posted->frame.get(), sizeof(Frame)));
  complete_by(posted, [group = group_, rank = from.rank, tag = tag_of_payload(from.context, message.number),
                       number = message.number, dtype = message.tensor.scalar_type()](Posted& p) {
    if (!await(p.works.front())) return false;
    const Frame& frame = *p.frame;
    if (frame.bytes != p.bytes || frame.number != number || frame.dtype != static_cast<int64_t>(dtype)) {
      const std::lock_guard lock(arrivals().mutex);
      p.came = comm_internal::describe_message(frame.bytes, frame.number, static_cast<at::ScalarType>(frame.dtype));
      return false;
    }
    if (p.bytes <= Frame::kInside) {
      std::memcpy(p.data, frame.inside.data(), static_cast<size_t>(p.bytes));
      return true;
    }
    WorkPtr payload;
    {
      const std::lock_guard lock(arrivals().mutex);  // all messages of a group are posted under it
      payload = group->start(false, rank, tag, p.data, p.bytes);
    }
    return add(p, payload) && await(payload);
  });
  return posted;
}

void Channel::abandon(const TransferPtr& transfer) {
  auto& posted = static_cast<Posted&>(*transfer);
  if (posted.done || posted.abandoned) return;
  posted.abandoned = true;
  [[maybe_unused]] const auto* leaked = new TransferPtr(transfer);
  for (const WorkPtr& work : posted.works) abort(work);
}

std::string describe_message(const Channel::Described& message) {
  return comm_internal::describe_message(static_cast<int64_t>(message.tensor.nbytes()), message.number,
                                         message.tensor.scalar_type(), ", " + list_text(message.tensor.sizes()));
}

}  // namespace annulus::c10d_internal
