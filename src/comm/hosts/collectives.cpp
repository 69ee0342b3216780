#include "comm/hosts/collectives.h"

#include "comm/backend_shm.h"
#include "comm/reduce.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>

namespace fsdp2::comm {
namespace {

using Op = c10d::ReduceOp::RedOpType;

// Smaller ones cross the network once for each rank, not once for each host, and are done then.
constexpr int64_t kSendWholeBytes = int64_t{16} * 1024;

// More time for a mate that may itself wait for another host until the deadline: it has the better
// error to tell.
constexpr std::chrono::seconds kToTell{2};

/// Elements of a flat tensor, which they keep alive. No op: nothing that watches ops sees it.
at::Tensor elements(const at::Tensor& of, int64_t from, int64_t count) {
  auto* start =
      static_cast<std::byte*>(of.data_ptr()) + from * static_cast<int64_t>(of.element_size());
  return at::from_blob(start, {count}, [of](void*) {}, at::TensorOptions().dtype(of.scalar_type()));
}

std::byte* start_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

int64_t length_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

at::Tensor new_flat(int64_t count, c10::ScalarType type) {
  return at::detail::empty_cpu({count}, type);
}

/// Of one host. An average is a sum until all hosts' are there.
c10d::ReduceOp within_host(const c10d::ReduceOp& op) {
  return op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
}

}  // namespace

HostsCollectives::HostsCollectives(std::shared_ptr<const HostPlaces> places,
                                   c10::intrusive_ptr<c10d::Backend> shm,
                                   std::shared_ptr<HostsNetwork> network)
    : places_(std::move(places)), shm_(std::move(shm)), network_(std::move(network)) {}

std::string HostsCollectives::break_up(const std::string& why) const {
  const std::string first = break_up_shm(*shm_, why);
  network_->close(first);
  return first;
}

void HostsCollectives::wait_all(const std::vector<Message>& messages, const HostsCall& call) const {
  for (const Message& message : messages) network_->wait(message, call);
}

void HostsCollectives::all_gather(const at::Tensor& output, const at::Tensor& input,
                                  const HostsCall& call) const {
  const int64_t count = input.numel();
  Tensors outputs;
  for (int rank = 0; rank < static_cast<int>(places_->names.size()); ++rank)
    outputs.push_back(elements(output, rank * count, count));
  gather(outputs, elements(input, 0, count), call);
}

void HostsCollectives::gather(const Tensors& outputs, const at::Tensor& input,
                              const HostsCall& call) const {
  const auto output_of = [&](int rank) { return outputs[static_cast<size_t>(rank)]; };
  std::vector<Message> received, sent;
  for (const int other : own_carried())
    received.push_back(network_->receive(other, output_of(other), call));
  for (size_t host = 0; host < places_->members.size(); ++host) {
    if (host != places_->host)
      sent.push_back(network_->send(places_->carrier(host, places_->rank), input, call));
  }
  // In each round every mate gives the others one share: first its own, then those that it carries.
  const at::Tensor nothing = new_flat(input.numel(), input.scalar_type());
  const size_t rounds = input.numel() > 0 ? places_->most_carried + 1 : 1;
  std::vector<WorkPtr> works;
  for (size_t round = 0; round < rounds; ++round) {
    const auto share_of = [&](size_t mate) {
      if (round == 0) return output_of(places_->mates()[mate]);
      const std::vector<int>& carried = places_->carried[mate];
      return round <= carried.size() ? output_of(carried[round - 1]) : nothing;
    };
    std::vector<Tensors> to(1);
    for (size_t mate = 0; mate < places_->mates().size(); ++mate) to[0].push_back(share_of(mate));
    Tensors from = {round == 0 ? input : to[0][places_->index]};
    if (round > 0 && round <= received.size()) network_->wait(received[round - 1], call);
    works.push_back(shm_->allgather(to, from));
    // A late mate is found here, before anyone's time has passed in waiting for other hosts.
    if (round == 0) works[0]->wait(call.left());
  }
  for (const WorkPtr& work : works) work->wait(call.left(kToTell));
  wait_all(sent, call);
}

std::vector<HostsNetwork::Message> HostsCollectives::receive_from_carriers(
    const at::Tensor& like, Tensors& by_host, const HostsCall& call) const {
  std::vector<Message> messages;
  by_host.resize(places_->members.size());
  for (size_t host = 0; host < by_host.size(); ++host) {
    if (host == places_->host) continue;
    by_host[host] = new_flat(like.numel(), like.scalar_type());
    messages.push_back(
        network_->receive(places_->carrier(host, places_->rank), by_host[host], call));
  }
  return messages;
}

void HostsCollectives::reduce_hosts(const at::Tensor& output, const Tensors& by_host,
                                    const c10d::ReduceOp& op) const {
  c10::SmallVector<const std::byte*, 8> inputs;
  for (const at::Tensor& of_host : by_host) inputs.push_back(start_of(of_host));
  // Each host has multiplied already.
  const Op rest = op == c10d::ReduceOp::PREMUL_SUM ? Op::SUM : static_cast<Op>(op.op_);
  reduce_in_order(start_of(output), inputs, length_of(output), output.scalar_type(), rest,
                  static_cast<int64_t>(places_->names.size()));
}

void HostsCollectives::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                      const c10d::ReduceOp& op, const HostsCall& call) const {
  const int64_t count = output.numel();
  Tensors inputs;
  for (int rank = 0; rank < static_cast<int>(places_->names.size()); ++rank)
    inputs.push_back(elements(input, rank * count, count));
  scatter(elements(output, 0, count), inputs, op, call);
}

void HostsCollectives::scatter(const at::Tensor& output, const Tensors& inputs,
                               const c10d::ReduceOp& op, const HostsCall& call) const {
  const auto input_for = [&](int rank) { return inputs[static_cast<size_t>(rank)]; };
  Tensors by_host;
  const std::vector<Message> received = receive_from_carriers(output, by_host, call);
  // In each round every mate gets this host's sum of one share: its own first, then one for each
  // rank that it carries.
  const size_t rounds = output.numel() > 0 ? places_->most_carried + 1 : 1;
  Tensors sums;
  std::vector<WorkPtr> works;
  for (size_t round = 0; round < rounds; ++round) {
    std::vector<Tensors> from(1);
    for (size_t mate = 0; mate < places_->mates().size(); ++mate) {
      const std::vector<int>& carried = places_->carried[mate];
      const bool spare = round > carried.size();
      from[0].push_back(round == 0 || spare ? input_for(places_->mates()[mate])
                                            : input_for(carried[round - 1]));
    }
    Tensors to = {new_flat(output.numel(), output.scalar_type())};
    sums.push_back(to[0]);
    c10d::ReduceScatterOptions options;
    options.reduceOp = within_host(op);
    works.push_back(shm_->reduce_scatter(to, from, options));
  }
  std::vector<Message> sent;
  for (size_t round = 0; round < rounds; ++round) {
    works[round]->wait(call.left());
    if (round > 0 && round <= own_carried().size())
      sent.push_back(network_->send(own_carried()[round - 1], sums[round], call));
  }
  by_host[places_->host] = sums[0];
  wait_all(received, call);
  reduce_hosts(output, by_host, op);
  wait_all(sent, call);
}

void HostsCollectives::all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                  const HostsCall& call) const {
  if (length_of(tensor) <= kSendWholeBytes) return all_reduce_whole(tensor, op, call);
  const int64_t total = tensor.numel();
  const auto ranks = static_cast<int64_t>(places_->names.size());
  const int64_t count = (total + ranks - 1) / ranks;
  const auto size = static_cast<int64_t>(tensor.element_size());
  const auto inside = [&](int64_t rank) {
    return std::clamp<int64_t>(total - rank * count, 0, count);
  };
  // Shares that are not whole are filled up elsewhere.
  Tensors shares;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (inside(rank) == count) {
      shares.push_back(elements(tensor, rank * count, count));
      continue;
    }
    shares.push_back(new_flat(count, tensor.scalar_type()));
    std::memset(start_of(shares.back()), 0, static_cast<size_t>(length_of(shares.back())));
    std::memcpy(start_of(shares.back()), start_of(tensor) + std::min(rank * count, total) * size,
                static_cast<size_t>(inside(rank) * size));
  }
  const at::Tensor own = new_flat(count, tensor.scalar_type());
  scatter(own, shares, op, call);
  gather(shares, own, call);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (inside(rank) == count) continue;
    std::memcpy(start_of(tensor) + std::min(rank * count, total) * size,
                start_of(shares[static_cast<size_t>(rank)]),
                static_cast<size_t>(inside(rank) * size));
  }
}

void HostsCollectives::all_reduce_whole(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                        const HostsCall& call) const {
  Tensors by_host;
  const std::vector<Message> received = receive_from_carriers(tensor, by_host, call);
  const at::Tensor sum = elements(tensor, 0, tensor.numel());
  Tensors tensors = {sum};
  c10d::AllreduceOptions options;
  options.reduceOp = within_host(op);
  shm_->allreduce(tensors, options)->wait(call.left());
  std::vector<Message> sent;
  for (const int other : own_carried()) sent.push_back(network_->send(other, sum, call));
  by_host[places_->host] = sum;
  wait_all(received, call);
  // The result takes the place of what is sent.
  wait_all(sent, call);
  reduce_hosts(sum, by_host, op);
}

}  // namespace fsdp2::comm
