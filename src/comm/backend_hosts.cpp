// Backend "hosts": c10d's face of it. What it does is in hosts/.

#include "comm/backend_hosts.h"

#include "comm/backend.h"
#include "comm/backend_checks.h"
#include "comm/hosts/collectives.h"
#include "comm/hosts/queue.h"
#include "comm/reduce.h"
#include "comm/rendezvous.h"
#include "comm/shm/segment.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <utility>

namespace fsdp2::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class HostsBackend final : public c10d::Backend {
 public:
  HostsBackend(std::shared_ptr<const HostPlaces> places, c10::intrusive_ptr<c10d::Backend> shm,
               const c10::intrusive_ptr<c10d::Backend>& gloo, std::vector<int> global_ranks,
               c10::intrusive_ptr<Options> options)
      : c10d::Backend(places->rank, static_cast<int>(places->names.size())),
        places_(std::move(places)),
        network_(std::make_shared<HostsNetwork>(gloo, places_, std::move(global_ranks))),
        collectives_(std::make_shared<HostsCollectives>(places_, std::move(shm), network_)),
        queue_(std::make_shared<HostsQueue>(
            [does = collectives_](const std::string& why) { return does->break_up(why); },
            [network = network_] { network->disconnect(); })),
        options_(std::move(options)),
        checks_("hosts", options_->group_name) {}
  ~HostsBackend() override { queue_->stop(); }

  const std::string getBackendName() const override { return "hosts"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    if (const auto gloo = network_->gloo()) gloo->getBackendOptions()->timeout = timeout;
  }
  void abort() override {
    queue_->fail(c10::str("rank ", own_rank(), " has aborted group '", options_->group_name, "'"));
  }
  void shutdown() override { queue_->stop(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return queue_->started(); }

  const HostPlaces& places() const { return *places_; }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    checks_.tensor(output, "all_gather");
    checks_.tensor(input, "all_gather");
    check_sizes(output, input, "all_gather");
    return start("all_gather", input, nullptr, options.timeout, output,
                 [does = collectives_, output, input](const HostsCall& call) {
                   does->all_gather(output, input, call);
                 });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    checks_.tensor(output, "reduce_scatter");
    checks_.tensor(input, "reduce_scatter");
    check_sizes(input, output, "reduce_scatter");
    checks_.reduction(input, options.reduceOp);
    return start("reduce_scatter", input, &options.reduceOp, options.timeout, output,
                 [does = collectives_, output, input, op = options.reduceOp](
                     const HostsCall& call) { does->reduce_scatter(output, input, op, call); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    checks_.one_tensor(tensors, "all_reduce");
    const at::Tensor& tensor = tensors[0];
    checks_.reduction(tensor, options.reduceOp);
    return start("all_reduce", tensor, &options.reduceOp, options.timeout, tensor,
                 [does = collectives_, tensor, op = options.reduceOp](const HostsCall& call) {
                   does->all_reduce(tensor, op, call);
                 });
  }

  // The rest is gloo's.

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return over_gloo([&](auto& gloo) { return gloo.allreduce_coalesced(tensors, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return over_gloo([&](auto& gloo) { return gloo.barrier(options); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override {
    // It blocks, and so cannot be started as others are: nothing else is to use gloo meanwhile.
    queue_->drain();
    const auto gloo = network_->gloo();
    if (!gloo) barrier(options);  // which says why
    gloo->monitoredBarrier(options, wait_all);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return over_gloo([&](auto& gloo) { return gloo.broadcast(tensors, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return over_gloo([&](auto& gloo) { return gloo.reduce(tensors, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return over_gloo([&](auto& gloo) { return gloo.allgather(outputs, inputs, options); });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    return over_gloo(
        [&](auto& gloo) { return gloo.allgather_coalesced(outputs, inputs, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return over_gloo(
        [&](auto& gloo) { return gloo.allgather_into_tensor_coalesced(outputs, inputs, options); });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return over_gloo([&](auto& gloo) { return gloo.gather(outputs, inputs, options); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    return over_gloo([&](auto& gloo) { return gloo.scatter(outputs, inputs, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return over_gloo([&](auto& gloo) { return gloo.reduce_scatter(outputs, inputs, options); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return over_gloo(
        [&](auto& gloo) { return gloo.reduce_scatter_tensor_coalesced(outputs, inputs, options); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    return over_gloo([&](auto& gloo) {
      return gloo.alltoall_base(output, input, output_splits, input_splits, options);
    });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    return over_gloo([&](auto& gloo) { return gloo.alltoall(outputs, inputs, options); });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    check_tag(tag);
    return over_gloo([&](auto& gloo) { return gloo.send(tensors, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    check_tag(tag);
    return over_gloo([&](auto& gloo) { return gloo.recv(tensors, from, tag); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    check_tag(tag);
    return over_gloo([&](auto& gloo) { return gloo.recvAnysource(tensors, tag); });
  }

 private:
  template <class Call>
  WorkPtr over_gloo(const Call& call) {
    return network_->start(call);
  }
  WorkPtr start(const char* name, const at::Tensor& input, const c10d::ReduceOp* op,
                std::chrono::milliseconds timeout, const at::Tensor& result,
                std::function<void(const HostsCall&)> run) {
    HostsCall call;
    call.what =
        c10::str(name, " of ", input.nbytes(), " bytes",
                 op ? c10::str(" (", name_of_reduction(op->op_), " of ", input.scalar_type(), ")")
                    : std::string());
    call.group = options_->group_name;
    call.rank = own_rank();
    call.timeout = timeout.count() > 0 ? timeout : options_->timeout;
    auto work =
        c10::make_intrusive<HostsWork>(queue_, std::move(call), Tensors{result}, std::move(run));
    queue_->start(work);
    return work;
  }

  void check_sizes(const at::Tensor& large, const at::Tensor& small, const char* name) const {
    checks_.same_type(large, small, name);
    TORCH_CHECK(large.numel() == small.numel() * size_, "hosts: ", name, " in group '",
                options_->group_name, "': tensors of ", large.numel(), " and ", small.numel(),
                " elements for ", size_, " ranks");
  }
  /// Of the world.
  int own_rank() const {
    return static_cast<int>(options_->global_ranks_in_group[static_cast<size_t>(rank_)]);
  }
  static void check_tag(int tag) {
    TORCH_CHECK(tag < kFirstHostsTag, "hosts: the tag is ", tag, ": it must be below ",
                kFirstHostsTag);
  }

  const std::shared_ptr<const HostPlaces> places_;
  const std::shared_ptr<HostsNetwork> network_;
  const std::shared_ptr<HostsCollectives> collectives_;
  const std::shared_ptr<HostsQueue> queue_;
  const c10::intrusive_ptr<Options> options_;
  const BackendChecks checks_;
};

/// Of the ranks of this host. ShmRefused on all ranks of the group if one of them cannot.
c10::intrusive_ptr<c10d::Backend> make_mates_backend(const BackendOptions& options,
                                                     const HostPlaces& places) {
  BackendOptions mates = options;
  mates.store =
      c10::make_intrusive<c10d::PrefixStore>("host" + std::to_string(places.host), options.store);
  mates.rank = static_cast<int>(places.index);
  mates.global_ranks.clear();
  for (const int mate : places.mates())
    mates.global_ranks.push_back(options.global_ranks[static_cast<size_t>(mate)]);
  c10::intrusive_ptr<c10d::Backend> shm;
  std::string refusal;
  try {
    shm = make_shm_backend(mates);
  } catch (const ShmRefused& error) {
    refusal = error.what();
  }
  for (const std::string& of_rank :
       exchange_texts(c10::make_intrusive<c10d::PrefixStore>("shared", options.store),
                      options.global_ranks[static_cast<size_t>(options.rank)], options.global_ranks,
                      refusal, "group '" + options.group_name + "'", options.timeout)) {
    if (!of_rank.empty()) throw ShmRefused(of_rank);
  }
  return shm;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_hosts_backend(const BackendOptions& options,
                                                     const std::vector<std::string>& hosts) {
  auto made_for = c10::make_intrusive<c10d::Backend::Options>("hosts", options.timeout);
  made_for->group_name = options.group_name;
  made_for->global_ranks_in_group.assign(options.global_ranks.begin(), options.global_ranks.end());
  auto places = std::make_shared<const HostPlaces>(hosts, options.rank);
  auto shm = make_mates_backend(options, *places);
  BackendOptions all = options;
  all.store = c10::make_intrusive<c10d::PrefixStore>("all", options.store);
  return c10::make_intrusive<HostsBackend>(std::move(places), std::move(shm),
                                           make_gloo_backend(all), options.global_ranks,
                                           std::move(made_for));
}

std::vector<std::string> hosts_of_backend(const c10d::Backend& backend) {
  const auto* hosts = dynamic_cast<const HostsBackend*>(&backend);
  return hosts ? hosts->places().names : std::vector<std::string>();
}

}  // namespace fsdp2::comm
