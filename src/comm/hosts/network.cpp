#include "comm/hosts/network.h"

#include "comm/rendezvous.h"
#include "comm/work.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace fsdp2::comm {
namespace {

// As many as a tag of gloo can have.
constexpr uint64_t kHostsTags = uint64_t{1} << 30U;

/// FNV-1a, the same in every build.
uint64_t digest_of(const HostsCall& call) {
  uint64_t digest = 0xcbf29ce484222325;
  for (const char c : call.what + ' ' + std::to_string(call.number))
    digest = (digest ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return digest ^ digest >> 32U;
}

[[noreturn]] void throw_network_error(const std::string& text) {
  throw PeerError({__func__, __FILE__, __LINE__}, text);
}

}  // namespace

std::chrono::milliseconds HostsCall::left(std::chrono::milliseconds more) const {
  using std::chrono::milliseconds;
  const auto now = std::chrono::steady_clock::now();
  return std::max(milliseconds(1), std::chrono::ceil<milliseconds>(deadline - now) + more);
}

HostsNetwork::HostsNetwork(c10::intrusive_ptr<c10d::Backend> gloo,
                           std::shared_ptr<const HostPlaces> places, std::vector<int> global_ranks)
    : places_(std::move(places)), global_ranks_(std::move(global_ranks)), gloo_(std::move(gloo)) {}

// The call is in it, as gloo ends the process where a message is longer than was expected. The
// ranks are, as gloo spreads tags over its network interfaces.
int HostsNetwork::tag(int peer, const HostsCall& call) const {
  const auto ranks = static_cast<uint64_t>(places_->rank) + static_cast<uint64_t>(peer);
  return kFirstHostsTag + static_cast<int>((digest_of(call) + ranks) % kHostsTags);
}

HostsNetwork::Message HostsNetwork::remember(int peer, bool sends,
                                             c10::intrusive_ptr<c10d::Work> work) {
  open_.push_back(work);
  return {std::move(work), peer, sends};
}

HostsNetwork::Message HostsNetwork::send(int to, const at::Tensor& tensor, const HostsCall& call) {
  if (tensor.numel() == 0) return {nullptr, to, true};
  std::vector<at::Tensor> tensors = {tensor};
  const std::lock_guard lock(mutex_);
  check_open();
  return remember(to, true, gloo_->send(tensors, to, tag(to, call)));
}

HostsNetwork::Message HostsNetwork::receive(int from, const at::Tensor& tensor,
                                            const HostsCall& call) {
  if (tensor.numel() == 0) return {nullptr, from, false};
  std::vector<at::Tensor> tensors = {tensor};
  const std::lock_guard lock(mutex_);
  check_open();
  return remember(from, false, gloo_->recv(tensors, from, tag(from, call)));
}

void HostsNetwork::wait(const Message& message, const HostsCall& call) {
  if (!message.work) return;
  bool over = false;
  std::string reason;
  try {
    over = message.work->wait(call.left());
  } catch (const std::exception& error) {
    reason = plain_message(error);
  }
  const std::lock_guard lock(mutex_);
  std::erase(open_, message.work);
  if (over) return;
  if (!closed_.empty()) throw_network_error(closed_);
  const auto peer = static_cast<size_t>(message.peer);
  const std::string who =
      c10::str("rank ", global_ranks_[peer], " on host ", places_->host_name(message.peer));
  const int own = global_ranks_[static_cast<size_t>(places_->rank)];
  if (call.deadline <= std::chrono::steady_clock::now()) {
    throw_network_error(c10::str("rank ", own, " timed out: it waited ",
                                 duration_text(call.timeout), " for ", who, " in ", call.text(),
                                 ", which has not called it, or called something else instead, or "
                                 "is too slow, or waits for another rank"));
  }
  throw_network_error(c10::str("rank ", own, " has lost ", who, ", which has ended or failed, in ",
                               call.text(), ". The cause: ", reason));
}

c10::intrusive_ptr<c10d::Backend> HostsNetwork::gloo() {
  const std::lock_guard lock(mutex_);
  return closed_.empty() ? gloo_ : nullptr;
}

void HostsNetwork::check_open() const {
  if (!closed_.empty()) throw_network_error(closed_);
}

void HostsNetwork::close(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!closed_.empty()) return;
  closed_ = why;
  for (const auto& work : std::exchange(open_, {})) work->abort();
}

void HostsNetwork::disconnect() {
  c10::intrusive_ptr<c10d::Backend> dropped;
  const std::lock_guard lock(mutex_);
  if (!closed_.empty()) std::swap(dropped, gloo_);
}

}  // namespace fsdp2::comm
