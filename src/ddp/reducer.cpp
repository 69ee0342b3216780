#include "ddp/reducer.h"

#include "comm/trace_range.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

namespace fsdp2::ddp {
namespace {

// So far below zero that no number of ranks that do have the gradient lifts it up again.
constexpr int64_t kAbandoned = -(int64_t{1} << 24);

std::vector<std::vector<size_t>> buckets_of(const std::vector<torch::Tensor>& parameters,
                                            size_t first, size_t cap) {
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(
      parameters, {std::min(first, cap), cap}, std::vector<bool>(parameters.size(), false));
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

/// Whether works of `group` move only while somebody waits for them.
bool needs_waiting(const ProcessGroup& group) {
  return group->getBackend(group->getDeviceTypes().front().type())->getBackendName() == "shm";
}

size_t bytes_of(double mb) { return std::max<size_t>(1, static_cast<size_t>(mb * 1024 * 1024)); }

}  // namespace

/// In the place of futures that a thread of their own would complete, which takes turns on a core
/// with the thread that computes.
class Reducer::Means final : public c10d::CommHookInterface {
 public:
  explicit Means(ProcessGroup group) : group_(std::move(group)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    std::vector<torch::Tensor> tensors = {bucket.getBufferRef()};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    started_.push_back({group_->allreduce(tensors, options), tensors, future});
    return future;
  }
  torch::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

  void wait() {
    for (const Started& one : std::exchange(started_, {})) {
      try {
        one.work->wait();
        one.future->markCompleted(c10::IValue(one.tensors));
      } catch (const std::exception&) {
        one.future->setError(std::current_exception());
      }
    }
  }

 private:
  struct Started {
    Work work;
    std::vector<torch::Tensor> tensors;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };
  const ProcessGroup group_;
  std::vector<Started> started_;
};

Reducer::Reducer(const std::vector<torch::Tensor>& parameters, const ProcessGroup& group,
                 const ReducerOptions& options)
    : c10d::Reducer(
          parameters,
          buckets_of(parameters, c10d::kDefaultFirstBucketBytes, bytes_of(options.bucket_cap_mb)),
          group, std::vector<bool>(parameters.size(), false),
          static_cast<int64_t>(bytes_of(options.bucket_cap_mb)),
          /*find_unused_parameters=*/true, options.gradient_as_bucket_view,
          /*param_names=*/{}, c10d::kDefaultFirstBucketBytes,
          /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
          /*bucket_bytes_cap_list=*/{}) {
  remove_autograd_hooks();
  if (!needs_waiting(group)) return;
  auto means = std::make_unique<Means>(group);
  means_ = means.get();
  register_comm_hook(std::move(means));
}

void Reducer::wait_for_means() {
  if (means_) means_->wait();
}

std::unique_ptr<Reducer> make_reducer(const std::vector<torch::Tensor>& parameters,
                                      const ProcessGroup& group, const ReducerOptions& options) {
  // Gradients that are views of buckets must not look like views: zero_grad() detaches them in
  // place, which views refuse.
  const at::AutoDispatchBelowADInplaceOrView guard;
  return std::make_unique<Reducer>(parameters, group, options);
}

void Reducer::begin() {
  wait_for_means();
  for (const Work& work : std::exchange(left_behind_, {})) work->wait();
  for (const Bucket& bucket : buckets_) {
    if (bucket.future_work) bucket.future_work->wait();
  }
  reset_state();
  prepare_for_backward({});
  // It takes what no output reaches for unused, and was given no outputs.
  unused_parameters_.clear();
}

void Reducer::wait() {
  const comm::TraceRange range("fsdp2::wait replicas");
  wait_for_means();
  for (const Bucket& bucket : buckets_) {
    bucket.future_work->wait();
    if (bucket.future_work->hasError()) std::rethrow_exception(bucket.future_work->exception_ptr());
  }
  local_used_work_->wait();
}

void Reducer::send(torch::Tensor tensor, const c10d::ReduceOp& op) {
  std::vector<torch::Tensor> tensors = {std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  left_behind_.push_back(process_group_->allreduce(tensors, options));
}

void Reducer::abandon() {
  for (size_t i = next_bucket_; i < buckets_.size(); ++i) {
    send(torch::zeros_like(buckets_[i].gradients),
         means_ ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
  }
  send(torch::full_like(local_used_map_dev_, kAbandoned), c10d::ReduceOp::SUM);
  reset_state();
}

}  // namespace fsdp2::ddp
