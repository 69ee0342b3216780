#include "ddp/reducer.h"

#include "comm/host_presence.h"
#include "comm/threads.h"
#include "comm/trace_range.h"
#include "ddp/shared_buckets.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

namespace fsdp2::ddp {
namespace {

// So far below zero that no number of ranks that do have the gradient lifts it up again.
constexpr int64_t kAbandoned = -16'777'216;

std::vector<std::vector<size_t>> buckets_of(const std::vector<torch::Tensor>& parameters,
                                            size_t first, size_t cap) {
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(
      parameters, {std::min(first, cap), cap}, std::vector<bool>(parameters.size(), false));
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

size_t bytes_of(double mb) { return std::max<size_t>(1, static_cast<size_t>(mb * 1024 * 1024)); }

}  // namespace

/// Means over ranks that share memory, in the place of an all-reduce.
class Reducer::Means final : public c10d::CommHookInterface {
 public:
  explicit Means(std::unique_ptr<SharedBuckets> buckets) : buckets_(std::move(buckets)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    started_.push_back({bucket.getBufferRef(), comm::new_tensors_future()});
    buckets_->post();
    return started_.back().future;
  }
  torch::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

  void wait() {
    std::exception_ptr failed;
    try {
      buckets_->finish();
    } catch (const std::exception&) {
      failed = std::current_exception();
    }
    complete(failed);
  }
  void give_up() {
    buckets_->give_up();
    complete(nullptr);
  }

 private:
  struct Started {
    torch::Tensor buffer;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  void complete(const std::exception_ptr& failed) {
    for (const Started& one : std::exchange(started_, {})) {
      if (failed) {
        one.future->setError(failed);
      } else {
        one.future->markCompleted(c10::IValue(std::vector{one.buffer}));
      }
    }
  }

  const std::unique_ptr<SharedBuckets> buckets_;
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
  std::vector<torch::Tensor> buckets;
  buckets.reserve(buckets_.size());
  for (const Bucket& bucket : buckets_) buckets.push_back(bucket.gradients);
  auto means =
      std::make_unique<Means>(std::make_unique<SharedBuckets>(group, presence, std::move(buckets)));
  means_ = means.get();
  register_comm_hook(std::move(means));
}

std::unique_ptr<Reducer> make_reducer(const std::vector<torch::Tensor>& parameters,
                                      const ProcessGroup& group, const ReducerOptions& options) {
  // Gradients that are views of buckets must not look like views: zero_grad() detaches them in
  // place, which views refuse.
  const at::AutoDispatchBelowADInplaceOrView guard;
  return std::make_unique<Reducer>(parameters, group, options);
}

void Reducer::begin() {
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
  if (means_) means_->wait();
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
  if (means_) {
    means_->give_up();
  } else {
    for (size_t i = next_bucket_; i < buckets_.size(); ++i)
      send(torch::zeros_like(buckets_[i].gradients));
  }
  send(torch::full_like(local_used_map_dev_, kAbandoned));
  reset_state();
}

}  // namespace fsdp2::ddp
