#pragma once

// What goes between hosts in backend "hosts": messages over gloo.

#include "comm/hosts/places.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp2::comm {

/// One collective: what all ranks are to say of it alike, and until when it may take.
struct HostsCall {
  std::string what;   // "all_gather of 64 bytes"
  std::string group;  // its name
  int rank = -1;      // this one, of the world
  uint64_t number = 0;
  std::chrono::milliseconds timeout{};
  std::chrono::steady_clock::time_point deadline;

  /// For people.
  std::string text() const { return what + " of group '" + group + "'"; }
  /// Until the deadline, and some time more if asked; at least 1 ms.
  std::chrono::milliseconds left(std::chrono::milliseconds more = {}) const;
};

/// Tags from here on are the messages' own; others of the gloo group are its users'.
constexpr int kFirstHostsTag = 0x40000000;

/// One thread at a time sends and receives; the rest is thread-safe.
class HostsNetwork {
 public:
  /// `gloo` has all ranks of the group.
  HostsNetwork(c10::intrusive_ptr<c10d::Backend> gloo, std::shared_ptr<const HostPlaces> places,
               std::vector<int> global_ranks);

  struct Message {
    c10::intrusive_ptr<c10d::Work> work;  // null: of no bytes
    int peer = -1;
    bool sends = false;
  };
  /// Messages of two ranks in one call come in the order in which they were sent; those of calls
  /// that differ do not come. Tensors are flat; they are kept until the wait is over.
  Message send(int to, const at::Tensor& tensor, const HostsCall& call);
  Message receive(int from, const at::Tensor& tensor, const HostsCall& call);
  /// Blocks. PeerError that names the peer if it fails, or the call's deadline has passed.
  void wait(const Message& message, const HostsCall& call);

  /// Starts something else over gloo. Error if this is closed.
  template <class Start>
  auto start(const Start& start) {
    const std::lock_guard lock(mutex_);
    check_open();
    return start(*gloo_);
  }
  /// gloo, for what blocks; null if this is closed.
  c10::intrusive_ptr<c10d::Backend> gloo();

  /// Ends all messages and refuses new ones: the group is broken.
  void close(const std::string& why);
  /// Of what is closed: lets go of the connections, so that the peers see it at once. May block for
  /// what others do over gloo.
  void disconnect();

 private:
  Message remember(int peer, bool sends, c10::intrusive_ptr<c10d::Work> work);
  int tag(int peer, const HostsCall& call) const;
  void check_open() const;  // needs the mutex

  const std::shared_ptr<const HostPlaces> places_;
  const std::vector<int> global_ranks_;
  std::mutex mutex_;
  std::string closed_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::vector<c10::intrusive_ptr<c10d::Work>> open_;  // what close() ends
};

}  // namespace fsdp2::comm
