#include "fsdp/checks.h"
#include "fsdp/copying_comm.h"
#include "fsdp/plain_ops.h"
#include "fsdp/reduce_buffer.h"

#include <algorithm>
#include <cmath>

namespace fsdp2::fsdp {
namespace {

/// Without other ranks.
class LocalReduce final : public Reduce {
 public:
  LocalReduce(const CommContext& context, const std::vector<ReduceInput>& inputs,
              const ReduceOptions& options) {
    PlainOps plain;
    const double divisor = options.all_reduce ? options.divide_factor.value_or(1) : 1;
    for (const ReduceInput& input : inputs) {
      torch::Tensor own = input.partial;
      if (input.gradient.defined()) {
        own = input.gradient.to(options.dtype).contiguous();
        if (input.partial.defined()) own = own + input.partial;
        own = own.view(context.layouts[input.param].sizes);
      }
      if (own.defined() && divisor != 1) own = own / divisor;
      result_.users.push_back(own.defined() ? 1 : 0);
      result_.gradients.push_back(std::move(own));
    }
  }
  Result finish(const std::string&) override { return std::move(result_); }

 private:
  Result result_;
};

/// Fingerprint bits, user flags, gradients; all in the gradients' dtype, so that the one sum that
/// adds gradients also adds the flags. Bits must come out as 0 or the number of ranks.
class CopyingReduce final : public Reduce {
 public:
  CopyingReduce(const CommContextPtr& context, std::shared_ptr<ReduceScatter> custom,
                const std::vector<ReduceInput>& inputs, const ReduceOptions& options,
                std::unique_ptr<ReduceBuffer> filled, ReduceOutputs& outputs)
      : context_(context), custom_(std::move(custom)), options_(options) {
    PlainOps plain;
    std::vector<size_t> params;
    params.reserve(inputs.size());
    for (const ReduceInput& input : inputs) {
      params.push_back(input.param);
      partials_.push_back(input.partial);
      partial_ = partial_ || input.partial.defined();
    }
    buffer_ = filled ? std::move(filled)
                     : std::make_unique<ReduceBuffer>(context_, std::move(params), options_.dtype);
    comm::SharedReductions* shared =
        custom_ ? nullptr : context_->shared_reductions(options_.all_reduce);
    // Reductions are the only thing that replicas do together, in one order.
    if (shared && context_->world == 1 && !buffer_->input().defined())
      shared->prepare(context_->replicate_group);
    if (shared && !shared->fits(buffer_->nbytes())) shared = nullptr;
    sums_replicas_ = shared && context_->world == 1;
    const int64_t numel = context_->world * buffer_->piece();
    const at::TensorOptions real = buffer_->real_options();
    if (!buffer_->input().defined()) {
      buffer_->set_memory(shared ? shared->next_input(numel, real) : allocate({numel}, real));
    } else if (!shared) {
      buffer_->set_memory(buffer_->input().clone());  // it is not going to be added up there
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].gradient.defined()) buffer_->put(i, inputs[i].gradient);
      if (sums_replicas_ && partials_[i].defined()) buffer_->put(i, partials_[i]);
    }
    say_words();
    buffer_->close(own_words_, divisor_before());
    const torch::Tensor& input = buffer_->input();
    output_ = shared                             ? outputs.get(buffer_->piece(), real)
              : context_->world == 1 && !custom_ ? input
                                                 : allocate({buffer_->piece()}, real);
    divided_ = shared && options_.all_reduce &&
               (sums_replicas_ || (!partial_ && !context_->replicate_group));
    work_ = custom_ ? (*custom_)(output_, input, context_->reduce_group)
            : shared
                ? shared->start(output_, input, buffer_->words(),
                                divided_ ? divisor() / divisor_before() : 1)
                : reduce_scatter_single(output_, input, ReduceOp::kSum, context_->reduce_group);
  }

  Result finish(const std::string& what) override {
    Result result;
    {
      PlainOps plain;
      wait(work_, what);
      work_.reset();
      buffer_->set_memory({});
      if (!sums_replicas_) add_partials();
      if (context_->replicate_group && options_.all_reduce && !sums_replicas_)
        wait(all_reduce(output_, ReduceOp::kSum, context_->replicate_group), what);
      read_words(result);
      if (options_.all_reduce && !divided_) sums().div_(divisor() / divisor_before());
    }
    if (options_.hook && options_.all_reduce) {
      at::NoGradGuard no_grad;
      options_.hook(sums());
    }
    result.gradients.reserve(partials_.size());
    for (size_t i = 0; i < partials_.size(); ++i) {
      const ParamLayout& layout = context_->layouts[buffer_->params()[i]];
      result.gradients.push_back(
          buffer_->part(output_, i, layout.local_sizes(context_->world, context_->rank)));
    }
    return result;
  }

 private:
  torch::Tensor allocate(c10::IntArrayRef sizes, const at::TensorOptions& options) {
    return custom_ ? custom_->allocate(sizes, options) : at::empty(sizes, options);
  }
  torch::Tensor sums() const {
    return output_.narrow(0, buffer_->words(), buffer_->piece() - buffer_->words());
  }

  double divisor() const {
    return options_.divide_factor.value_or(
        static_cast<double>(context_->world * context_->replicas));
  }
  /// As FSDP2 splits the division of float16, about evenly.
  double divisor_before() const {
    if (options_.dtype != torch::kHalf) return 1;
    double before = 1;
    while (std::fmod(divisor(), before) == 0 && divisor() / before > before) before *= 2;
    return before;
  }

  void say_words() {
    own_words_ = at::zeros({buffer_->words()}, at::TensorOptions().dtype(torch::kFloat));
    float* word = own_words_.mutable_data_ptr<float>();
    for (uint32_t bit = 0; bit < kFingerprintBits; ++bit)
      word[bit] = static_cast<float>((options_.fingerprint >> bit) & 1u);
    for (size_t i = 0; i < partials_.size(); ++i)
      word[kFingerprintBits + i] = buffer_->has(i) ? 1.0F : 0.0F;
  }

  void add_partials() {
    if (!options_.all_reduce) return;
    for (size_t i = 0; i < partials_.size(); ++i) {
      const torch::Tensor& partial = partials_[i];
      if (!partial.defined()) continue;
      buffer_->part(output_, i, partial.sizes()).add_(partial);
      output_.narrow(0, static_cast<int64_t>(kFingerprintBits + i), 1).add_(1);
    }
  }

  void read_words(Result& result) const {
    const int64_t ranks = context_->world * (options_.all_reduce ? context_->replicas : 1);
    const torch::Tensor words =
        output_.is_meta() ? own_words_ * ranks
                          : output_.narrow(0, 0, buffer_->words()).to(torch::kFloat).cpu();
    const float* word = words.const_data_ptr<float>();
    const bool countable = ranks <= 256 || c10::elementSize(options_.dtype) > 2;
    for (uint32_t bit = 0; kChecks && countable && bit < kFingerprintBits; ++bit) {
      const float expected =
          ((options_.fingerprint >> bit) & 1u) ? static_cast<float>(ranks) : 0.0F;
      result.agreed = result.agreed && word[bit] == expected;
    }
    for (size_t i = 0; i < partials_.size(); ++i)
      result.users.push_back(static_cast<int64_t>(word[kFingerprintBits + i]));
  }

  const CommContextPtr context_;
  const std::shared_ptr<ReduceScatter> custom_;
  const ReduceOptions options_;
  std::unique_ptr<ReduceBuffer> buffer_;
  std::vector<torch::Tensor> partials_;  // undefined where there are none
  bool partial_ = false;                 // whether there are
  bool divided_ = false;                 // by who sums
  bool sums_replicas_ = false;           // in shared memory; within a copy there is one rank
  torch::Tensor output_, own_words_;
  Work work_;
};

/// In the memory of the next shared reduction.
class SharedStage final : public ReduceStage {
 public:
  SharedStage(CommContextPtr context, std::unique_ptr<ReduceBuffer> buffer)
      : context_(std::move(context)), buffer_(std::move(buffer)) {}
  ~SharedStage() override {
    if (buffer_) give_back();
  }

  const std::vector<size_t>& params() const override { return buffer_->params(); }
  void put(size_t i, const torch::Tensor& gradient) override {
    PlainOps plain;
    buffer_->put(i, gradient);
  }
  torch::Tensor take(size_t i) override {
    PlainOps plain;
    return buffer_->take(i);
  }
  std::unique_ptr<ReduceBuffer> release() {
    give_back();
    return std::move(buffer_);
  }

 private:
  void give_back() { context_->shared_reductions(/*all=*/true)->give_back_early_input(); }

  const CommContextPtr context_;
  std::unique_ptr<ReduceBuffer> buffer_;
};

}  // namespace

torch::Tensor ReduceOutputs::get(int64_t numel, const at::TensorOptions& options) {
  torch::Tensor& last = last_[c10::typeMetaToScalarType(options.dtype())];
  const bool free = last.defined() && last.use_count() == 1 && last.storage().use_count() == 1;
  if (!free || last.numel() != numel) last = at::empty({numel}, options);
  return last;
}

std::unique_ptr<ReduceStage> stage_shared_reduce(const CommContextPtr& context,
                                                 std::vector<size_t> params,
                                                 torch::ScalarType dtype,
                                                 std::function<void()> taken) {
  comm::SharedReductions* reductions = context->shared_reductions(/*all=*/true);
  if (!reductions) return nullptr;
  comm::SharedReductions& shared = *reductions;
  auto buffer = std::make_unique<ReduceBuffer>(context, std::move(params), dtype);
  if (!shared.fits(buffer->nbytes())) return nullptr;
  torch::Tensor input = shared.early_input(context->world * buffer->piece(), buffer->real_options(),
                                           std::move(taken));
  if (!input.defined()) return nullptr;
  buffer->set_memory(std::move(input));
  return std::make_unique<SharedStage>(context, std::move(buffer));
}

std::unique_ptr<Reduce> start_copying_reduce(CommContextPtr context,
                                             std::shared_ptr<ReduceScatter> custom,
                                             const std::vector<ReduceInput>& inputs,
                                             const ReduceOptions& options,
                                             std::unique_ptr<ReduceStage> stage,
                                             ReduceOutputs& outputs) {
  if (context->world * context->replicas == 1 && !options.hook && !custom)
    return std::make_unique<LocalReduce>(*context, inputs, options);
  auto filled = stage ? static_cast<SharedStage&>(*stage).release() : nullptr;
  return std::make_unique<CopyingReduce>(context, std::move(custom), inputs, options,
                                         std::move(filled), outputs);
}

}  // namespace fsdp2::fsdp
