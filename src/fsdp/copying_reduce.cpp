#include "fsdp/checks.h"
#include "fsdp/copying_comm.h"
#include "fsdp/plain_ops.h"

#include <algorithm>
#include <cmath>

namespace fsdp2::fsdp {
namespace {

constexpr uint32_t kFingerprintBits = 24;
constexpr int64_t kReduceAlignment = 16;  // elements

int64_t words_for(size_t params) {
  return align_up(kFingerprintBits + static_cast<int64_t>(params), kReduceAlignment);
}

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

/// One rank's piece: fingerprint bits, user flags, gradients; all in the gradients' dtype, so that
/// the one sum that adds gradients also adds the flags. Bits must come out as 0 or the number of
/// ranks.
class CopyingReduce final : public Reduce {
 public:
  CopyingReduce(CommContextPtr context, std::shared_ptr<ReduceScatter> custom,
                const std::vector<ReduceInput>& inputs, const ReduceOptions& options)
      : context_(std::move(context)), custom_(std::move(custom)), options_(options) {
    PlainOps plain;
    const bool complex = c10::isComplexType(options_.dtype);
    const auto tensor_options =
        at::TensorOptions().dtype(c10::toRealValueType(options_.dtype)).device(context_->device);
    words_ = words_for(inputs.size());
    piece_ = words_;
    for (const ReduceInput& input : inputs) {
      const int64_t numel = context_->layouts[input.param].padded_chunk_numel(context_->world);
      const int64_t length = align_up(numel * (complex ? 2 : 1), kReduceAlignment);
      slots_.push_back({input.param, piece_, length, input.partial});
      piece_ += length;
    }
    SharedReductions* shared = context_->host && !custom_ ? &context_->host->reductions : nullptr;
    const size_t bytes = static_cast<size_t>(context_->world * piece_) *
                         c10::elementSize(c10::toRealValueType(options_.dtype));
    if (shared && !shared->fits(bytes)) shared = nullptr;
    input_ = shared ? shared->next_input({context_->world * piece_}, tensor_options)
                    : allocate_buffer({context_->world * piece_}, tensor_options);
    output_ = allocate_buffer({piece_}, tensor_options);
    fill_input(inputs);
    work_ = custom_ ? (*custom_)(output_, input_, context_->reduce_group)
            : shared
                ? shared->start(output_, input_)
                : reduce_scatter_single(output_, input_, ReduceOp::kSum, context_->reduce_group);
  }

  Result finish(const std::string& what) override {
    Result result;
    {
      PlainOps plain;
      wait(work_, what);
      work_.reset();
      input_.reset();
      add_partials();
      if (context_->replicate_group && options_.all_reduce)
        wait(all_reduce(output_, ReduceOp::kSum, context_->replicate_group), what);
      read_words(result);
      if (options_.all_reduce) sums().div_(divisor() / divisor_before());
    }
    if (options_.hook && options_.all_reduce) {
      at::NoGradGuard no_grad;
      options_.hook(sums());
    }
    for (size_t i = 0; i < slots_.size(); ++i) {
      const ParamLayout& layout = context_->layouts[slots_[i].param];
      result.gradients.push_back(
          part(output_, i, layout.local_sizes(context_->world, context_->rank)));
    }
    return result;
  }

 private:
  struct Slot {
    size_t param;
    int64_t offset, length;  // in numbers of the gradients' dtype, two for a complex one
    torch::Tensor partial;
  };

  torch::Tensor allocate_buffer(c10::IntArrayRef sizes, const at::TensorOptions& options) {
    return custom_ ? custom_->allocate(sizes, options) : at::empty(sizes, options);
  }
  torch::Tensor sums() const { return output_.narrow(0, words_, piece_ - words_); }

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

  void fill_input(const std::vector<ReduceInput>& inputs) {
    const torch::Tensor pieces = input_.view({context_->world, piece_});
    own_words_ = at::zeros({words_}, at::TensorOptions().dtype(torch::kFloat));
    float* word = own_words_.mutable_data_ptr<float>();
    for (uint32_t bit = 0; bit < kFingerprintBits; ++bit)
      word[bit] = static_cast<float>((options_.fingerprint >> bit) & 1u);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const torch::Tensor& gradient = inputs[i].gradient;
      word[kFingerprintBits + i] = gradient.defined() ? 1.0F : 0.0F;
      const ParamLayout& layout = context_->layouts[inputs[i].param];
      if (input_.is_meta()) continue;
      for (int64_t rank = 0; rank < context_->world; ++rank) {
        int64_t filled = 0;
        if (gradient.defined()) {
          const torch::Tensor mine = layout.local_part(gradient, context_->world, rank);
          if (mine.numel() > 0) part(pieces[rank], i, mine.sizes()).copy_(mine);
          filled = mine.numel() * (c10::isComplexType(options_.dtype) ? 2 : 1);
        }
        const int64_t rest = slots_[i].length - filled;
        if (rest > 0) pieces[rank].narrow(0, slots_[i].offset + filled, rest).zero_();
      }
    }
    if (divisor_before() > 1) input_.div_(divisor_before());
    if (!input_.is_meta())
      pieces.narrow(1, 0, words_).copy_(own_words_.expand({context_->world, words_}));
  }

  void add_partials() {
    if (!options_.all_reduce) return;
    for (size_t i = 0; i < slots_.size(); ++i) {
      const torch::Tensor& partial = slots_[i].partial;
      if (!partial.defined()) continue;
      part(output_, i, partial.sizes()).add_(partial);
      output_.narrow(0, static_cast<int64_t>(kFingerprintBits + i), 1).add_(1);
    }
  }

  void read_words(Result& result) const {
    const int64_t ranks = context_->world * (options_.all_reduce ? context_->replicas : 1);
    const torch::Tensor words = output_.is_meta()
                                    ? own_words_ * ranks
                                    : output_.narrow(0, 0, words_).to(torch::kFloat).cpu();
    const float* word = words.const_data_ptr<float>();
    const bool countable = ranks <= 256 || c10::elementSize(options_.dtype) > 2;
    for (uint32_t bit = 0; kChecks && countable && bit < kFingerprintBits; ++bit) {
      const float expected =
          ((options_.fingerprint >> bit) & 1u) ? static_cast<float>(ranks) : 0.0F;
      result.agreed = result.agreed && word[bit] == expected;
    }
    for (size_t i = 0; i < slots_.size(); ++i)
      result.users.push_back(static_cast<int64_t>(word[kFingerprintBits + i]));
  }

  torch::Tensor part(const torch::Tensor& piece, size_t i, c10::IntArrayRef sizes) const {
    const int64_t numel = c10::multiply_integers(sizes);
    const int64_t offset = slots_[i].offset;
    if (!c10::isComplexType(options_.dtype)) return piece.narrow(0, offset, numel).view(sizes);
    return at::view_as_complex(piece.narrow(0, offset, 2 * numel).view({numel, 2})).view(sizes);
  }

  CommContextPtr context_;
  std::shared_ptr<ReduceScatter> custom_;
  ReduceOptions options_;
  std::vector<Slot> slots_;
  int64_t words_ = 0, piece_ = 0;
  torch::Tensor input_, output_, own_words_;
  Work work_;
};

}  // namespace

size_t largest_reduction(const CommContext& context) {
  int64_t piece = words_for(context.layouts.size());
  int64_t widest = sizeof(float);
  for (const ParamLayout& layout : context.layouts) {
    const bool complex = c10::isComplexType(layout.dtype);
    piece +=
        align_up(layout.padded_chunk_numel(context.world) * (complex ? 2 : 1), kReduceAlignment);
    widest = std::max(widest, static_cast<int64_t>(c10::elementSize(layout.dtype)));
  }
  return static_cast<size_t>(context.world * piece * widest);
}

std::unique_ptr<Reduce> start_copying_reduce(CommContextPtr context,
                                             std::shared_ptr<ReduceScatter> custom,
                                             const std::vector<ReduceInput>& inputs,
                                             const ReduceOptions& options) {
  if (context->world * context->replicas == 1 && !options.hook && !custom)
    return std::make_unique<LocalReduce>(*context, inputs, options);
  return std::make_unique<CopyingReduce>(std::move(context), std::move(custom), inputs, options);
}

}  // namespace fsdp2::fsdp
