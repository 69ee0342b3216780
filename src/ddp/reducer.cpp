#include "ddp/reducer.h"

#include "comm/counting.h"
#include "comm/host_presence.h"
#include "comm/shared_reductions.h"
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

size_t bytes_of(double mb) { return std::max<size_t>(1, static_cast<size_t>(mb * 1024 * 1024)); }

}  // namespace

/// Means over ranks that share memory, in the place of an all-reduce: buckets are copied to where
/// all see them, and added up by who waits, in rank order.
class Reducer::Means final : public c10d::CommHookInterface {
 public:
  Means(const ProcessGroup& group, std::shared_ptr<comm::Presence> presence, size_t largest_bucket)
      : reductions_(std::move(presence)), ranks_(group->getSize()) {
    reductions_.want(largest_bucket);
    reductions_.prepare(group);
  }

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const torch::Tensor& buffer = bucket.getBufferRef();
    torch::Tensor input = next_input(buffer);
    input.copy_(buffer);
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    started_.push_back({start(buffer, input), buffer, future});
    return future;
  }
  torch::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

  /// What others wait for of this rank, whose backward has failed.
  void send_zeros(const torch::Tensor& buffer) {
    torch::Tensor input = next_input(buffer);
    input.zero_();
    started_.push_back({start(at::empty_like(buffer), input), {}, {}});
  }

  void wait() {
    for (const Started& one : std::exchange(started_, {})) {
      try {
        one.work->wait();
        if (one.future) one.future->markCompleted(c10::IValue(std::vector{one.buffer}));
      } catch (const std::exception&) {
        if (!one.future) throw;
        one.future->setError(std::current_exception());
      }
    }
  }

 private:
  struct Started {
    Work work;
    torch::Tensor buffer;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  torch::Tensor next_input(const torch::Tensor& buffer) {
    return reductions_.next_input(buffer.numel(), buffer.options());
  }
  Work start(const torch::Tensor& output, const torch::Tensor& input) {
    const comm::Uncounted uncounted;
    return reductions_.start(output, input, /*words=*/0, ranks_);
  }

  comm::SharedReductions reductions_;
  const double ranks_;
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
  const bool on_cpu = std::all_of(parameters.begin(), parameters.end(),
                                  [](const torch::Tensor& one) { return one.is_cpu(); });
  const auto presence = on_cpu ? comm::presence_of(group) : nullptr;
  if (!presence) return;
  size_t largest = 0;
  for (const Bucket& bucket : buckets_) largest = std::max(largest, bucket.gradients.nbytes());
  auto means = std::make_unique<Means>(group, presence, largest);
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

void Reducer::send(torch::Tensor tensor) {
  std::vector<torch::Tensor> tensors = {std::move(tensor)};
  left_behind_.push_back(process_group_->allreduce(tensors));
}

void Reducer::abandon() {
  for (size_t i = next_bucket_; i < buckets_.size(); ++i) {
    if (means_) {
      means_->send_zeros(buckets_[i].gradients);
    } else {
      send(torch::zeros_like(buckets_[i].gradients));
    }
  }
  send(torch::full_like(local_used_map_dev_, kAbandoned));
  reset_state();
}

}  // namespace fsdp2::ddp
