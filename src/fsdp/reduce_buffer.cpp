#include "fsdp/reduce_buffer.h"

#include "fsdp/plain_ops.h"

namespace fsdp2::fsdp {
namespace {

constexpr int64_t kReduceAlignment = 16;  // elements

int64_t length_of(const ParamLayout& layout, int64_t world, bool complex) {
  return align_up(layout.padded_chunk_numel(world) * (complex ? 2 : 1), kReduceAlignment);
}

void write(const torch::Tensor& to, const torch::Tensor& from, bool adds) {
  if (adds) {
    to.add_(from);
  } else {
    to.copy_(from);
  }
}

}  // namespace

int64_t words_for(size_t params) {
  return align_up(kFingerprintBits + static_cast<int64_t>(params), kReduceAlignment);
}

size_t largest_reduction(const CommContext& context) {
  int64_t piece = words_for(context.layouts.size());
  int64_t widest = sizeof(float);
  for (const ParamLayout& layout : context.layouts) {
    piece += length_of(layout, context.world, c10::isComplexType(layout.dtype));
    widest = std::max(widest, static_cast<int64_t>(c10::elementSize(layout.dtype)));
  }
  return static_cast<size_t>(context.world * piece * widest);
}

ReduceBuffer::ReduceBuffer(CommContextPtr context, std::vector<size_t> params,
                           torch::ScalarType dtype)
    : context_(std::move(context)),
      params_(std::move(params)),
      dtype_(dtype),
      filled_(params_.size(), false),
      words_(words_for(params_.size())),
      piece_(words_) {
  slots_.reserve(params_.size());
  for (const size_t param : params_) {
    const int64_t length =
        length_of(context_->layouts[param], context_->world, c10::isComplexType(dtype_));
    slots_.push_back({piece_, length});
    piece_ += length;
  }
}

at::TensorOptions ReduceBuffer::real_options() const {
  return at::TensorOptions().dtype(c10::toRealValueType(dtype_)).device(context_->device);
}

size_t ReduceBuffer::nbytes() const {
  return static_cast<size_t>(context_->world * piece_) *
         c10::elementSize(c10::toRealValueType(dtype_));
}

torch::Tensor ReduceBuffer::part(const torch::Tensor& piece, size_t i,
                                 c10::IntArrayRef sizes) const {
  const int64_t numel = c10::multiply_integers(sizes);
  const int64_t offset = slots_[i].offset;
  if (!c10::isComplexType(dtype_)) return piece.narrow(0, offset, numel).view(sizes);
  return at::view_as_complex(piece.narrow(0, offset, 2 * numel).view({numel, 2})).view(sizes);
}

void ReduceBuffer::put(size_t i, const torch::Tensor& gradient) {
  const bool again = filled_[i];
  filled_[i] = true;
  if (input_.is_meta()) return;
  const ParamLayout& layout = context_->layouts[params_[i]];
  const int64_t width = c10::isComplexType(dtype_) ? 2 : 1;
  const int64_t chunk = layout.padded_chunk_numel(context_->world);
  const torch::Tensor pieces = input_.view({context_->world, piece_});
  if (!again && slots_[i].length > chunk * width)
    pieces.narrow(1, slots_[i].offset + chunk * width, slots_[i].length - chunk * width).zero_();
  if (layout.shard_dim == 0 && gradient.is_contiguous() && chunk > 0) {
    put_rows(pieces, i, gradient.view({-1}), chunk, again);
    return;
  }
  for (int64_t rank = 0; rank < context_->world; ++rank) {
    const torch::Tensor mine = layout.local_part(gradient, context_->world, rank);
    if (mine.numel() > 0) write(part(pieces[rank], i, mine.sizes()), mine, again);
    const int64_t missing = (chunk - mine.numel()) * width;
    if (missing > 0 && !again)
      pieces[rank].narrow(0, slots_[i].offset + mine.numel() * width, missing).zero_();
  }
}

/// Parts of all ranks at once, as many as are full.
void ReduceBuffer::put_rows(const torch::Tensor& pieces, size_t i, const torch::Tensor& flat,
                            int64_t chunk, bool again) {
  const int64_t width = c10::isComplexType(dtype_) ? 2 : 1;
  const int64_t full = flat.numel() / chunk, rest = flat.numel() % chunk;
  const torch::Tensor parts = pieces.narrow(1, slots_[i].offset, chunk * width);
  const auto as_numbers = [&](const torch::Tensor& real, int64_t numel) {
    return width == 1 ? real : at::view_as_complex(real.unflatten(1, {numel, 2}));
  };
  write(as_numbers(parts.narrow(0, 0, full), chunk),
        flat.narrow(0, 0, full * chunk).view({full, chunk}), again);
  if (rest > 0)
    write(as_numbers(parts.narrow(0, full, 1).narrow(1, 0, rest * width), rest),
          flat.narrow(0, full * chunk, rest).view({1, rest}), again);
  if (again) return;
  if (rest > 0) parts[full].narrow(0, rest * width, (chunk - rest) * width).zero_();
  const int64_t used = full + (rest > 0 ? 1 : 0);
  if (used < context_->world) parts.narrow(0, used, context_->world - used).zero_();
}

torch::Tensor ReduceBuffer::take(size_t i) {
  if (!filled_[i]) return {};
  filled_[i] = false;
  const ParamLayout& layout = context_->layouts[params_[i]];
  const torch::Tensor gradient =
      at::empty(layout.sizes, at::TensorOptions().dtype(dtype_).device(context_->device));
  for (int64_t rank = 0; rank < context_->world; ++rank) {
    const torch::Tensor mine = layout.local_part(gradient, context_->world, rank);
    if (mine.numel() > 0)
      mine.copy_(part(input_.narrow(0, rank * piece_, piece_), i, mine.sizes()));
  }
  return gradient;
}

void ReduceBuffer::close(const torch::Tensor& words, double divisor) {
  if (input_.is_meta()) return;
  const torch::Tensor pieces = input_.view({context_->world, piece_});
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!filled_[i]) pieces.narrow(1, slots_[i].offset, slots_[i].length).zero_();
  }
  if (divisor != 1) pieces.narrow(1, words_, piece_ - words_).div_(divisor);
  pieces.narrow(1, 0, words_).copy_(words.expand({context_->world, words_}));
}

}  // namespace fsdp2::fsdp
