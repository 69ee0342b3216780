#include "comm/backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/types.h>

namespace fsdp2::comm {
namespace {

struct DoneWork final : c10d::Work {
  DoneWork() { finish(); }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    future->markCompleted();
    return future;
  }
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Other ranks are taken to pass what this one passes.
class FakeBackend final : public c10d::Backend {
 public:
  FakeBackend(int rank, int size, c10::intrusive_ptr<c10d::Backend::Options> options)
      : c10d::Backend(rank, size), options_(std::move(options)) {}

  const std::string getBackendName() const override { return "fake"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  WorkPtr broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override {
    return done();
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (at::Tensor& tensor : tensors) reduce_with_copies(tensor, options.reduceOp);
    return done();
  }

  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions&) override {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (size_t i = 0; i < inputs.size(); ++i) {
      for (at::Tensor& output : outputs[i]) output.copy_(inputs[i]);
    }
    return done();
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    const at::AutoDispatchBelowADInplaceOrView guard;
    output.view({getSize(), input.numel()}).copy_(input.view({1, input.numel()}));
    return done();
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    const at::AutoDispatchBelowADInplaceOrView guard;
    output.copy_(input.view({getSize(), output.numel()})[getRank()].view(output.sizes()));
    reduce_with_copies(output, options.reduceOp);
    return done();
  }

  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (options.rootRank == getRank()) outputs[0].copy_(inputs[0][getRank()]);
    return done();
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    const at::AutoDispatchBelowADInplaceOrView guard;
    int64_t start = 0;
    for (int rank = 0; rank < getRank(); ++rank) start += input_splits[rank];
    const at::Tensor piece = input.narrow(0, start, input_splits[getRank()]);
    int64_t offset = 0;
    for (const int64_t length : output_splits) {
      if (length == piece.numel()) output.narrow(0, offset, length).copy_(piece);
      offset += length;
    }
    return done();
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override { return done(); }

 private:
  static WorkPtr done() { return c10::make_intrusive<DoneWork>(); }

  void reduce_with_copies(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    if (op == c10d::ReduceOp::SUM) tensor.mul_(getSize());
    if (op == c10d::ReduceOp::PRODUCT) tensor.pow_(getSize());
  }

  c10::intrusive_ptr<Options> options_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_fake_backend(const BackendOptions& options) {
  auto fake = c10::make_intrusive<c10d::Backend::Options>("fake", options.timeout);
  fake->group_name = options.group_name;
  fake->global_ranks_in_group.assign(options.global_ranks.begin(), options.global_ranks.end());
  return c10::make_intrusive<FakeBackend>(
      options.rank, static_cast<int>(options.global_ranks.size()), std::move(fake));
}

}  // namespace fsdp2::comm
