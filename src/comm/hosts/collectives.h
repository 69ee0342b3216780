#pragma once

// The collectives of backend "hosts": shared memory inside each host, messages between hosts. All
// ranks of the group call the same ones in the same order; each blocks until this rank's part is
// done. Tensors are contiguous. When one throws, the group is broken for good.
//
// A rank's share of the result crosses the network once to each other host. There the mates spread
// what crosses evenly: each carries some of the ranks elsewhere.

#include "comm/hosts/network.h"
#include "comm/hosts/places.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp2::comm {

class HostsCollectives {
 public:
  /// `shm` has the ranks of this host, in order of rank; it may be this rank alone.
  HostsCollectives(std::shared_ptr<const HostPlaces> places, c10::intrusive_ptr<c10d::Backend> shm,
                   std::shared_ptr<HostsNetwork> network);

  void all_gather(const at::Tensor& output, const at::Tensor& input, const HostsCall& call) const;
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op,
                      const HostsCall& call) const;
  void all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op, const HostsCall& call) const;

  /// Breaks the group, also for the mates. Returns why: what the first of them has said.
  std::string break_up(const std::string& why) const;

 private:
  using Tensors = std::vector<at::Tensor>;
  using Message = HostsNetwork::Message;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  void gather(const Tensors& outputs, const at::Tensor& input, const HostsCall& call) const;
  void scatter(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op,
               const HostsCall& call) const;
  void all_reduce_whole(const at::Tensor& tensor, const c10d::ReduceOp& op,
                        const HostsCall& call) const;
  /// Starts to receive for each other host the tensor of `like`'s size that comes from the mate
  /// there that carries this rank. `by_host` gets them, and nothing at this host's place.
  std::vector<Message> receive_from_carriers(const at::Tensor& like, Tensors& by_host,
                                             const HostsCall& call) const;
  /// What comes from the hosts, reduced in their order.
  void reduce_hosts(const at::Tensor& output, const Tensors& by_host,
                    const c10d::ReduceOp& op) const;
  void wait_all(const std::vector<Message>& messages, const HostsCall& call) const;
  const std::vector<int>& own_carried() const { return places_->carried[places_->index]; }

  const std::shared_ptr<const HostPlaces> places_;
  const c10::intrusive_ptr<c10d::Backend> shm_;
  const std::shared_ptr<HostsNetwork> network_;
};

}  // namespace fsdp2::comm
