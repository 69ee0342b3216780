#pragma once

// How a user replaces what travels, and how: the communication of one wrapped module's collectives
// (AllGather, ReduceScatter), and the form in which one parameter's shards are sent
// (AllGatherExtension). Follow torch.distributed.fsdp's Comm interfaces and its tensor extensions
// fsdp_pre_all_gather and fsdp_post_all_gather.
//
// All functions run on the thread that gathers or reduces, with autograd off.

#include <fsdp2/process_group.h>

#include <torch/types.h>

#include <vector>

namespace fsdp2 {

/// Staging buffers of a collective.
class CommBuffers {
 public:
  virtual ~CommBuffers() = default;
  /// An uninitialised, contiguous tensor. Kept until the collective is done.
  virtual torch::Tensor allocate(c10::IntArrayRef sizes, const torch::TensorOptions& options);
};

/// See FSDPModule::set_custom_all_gather.
class AllGather : public CommBuffers {
 public:
  /// Starts output [ranks * n] = the inputs [n] (bytes) of all ranks, in rank order; the work is
  /// waited for by the caller. The first 64 bytes of each input are the library's own.
  virtual Work operator()(const torch::Tensor& output, const torch::Tensor& input,
                          const ProcessGroup& group) = 0;
};

/// See FSDPModule::set_custom_reduce_scatter.
class ReduceScatter : public CommBuffers {
 public:
  /// Starts output [n] = this rank's part of the sum of the inputs [ranks * n] of all ranks. The
  /// library divides. Some leading elements are flags of the library, whose sums must be exact.
  virtual Work operator()(const torch::Tensor& output, const torch::Tensor& input,
                          const ProcessGroup& group) = 0;
};

/// What is sent in the place of one parameter's shards; see FullyShardOptions. One object a
/// parameter.
class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;
  /// What this rank sends: dense tensors on the shard's device, whose sizes and dtypes are the same
  /// on all ranks. `shard` [n] is this rank's part, flat, in the dtype in which it is kept; padded
  /// with zeros to the length that it has on rank 0.
  virtual std::vector<torch::Tensor> pre_all_gather(const torch::Tensor& shard) = 0;
  /// Writes all parts to `out` [ranks, n], in the dtype in which the parameter computes. `gathered`
  /// is what the ranks sent: each tensor of pre_all_gather with a leading dimension of ranks.
  virtual void post_all_gather(const std::vector<torch::Tensor>& gathered,
                               const torch::Tensor& out) = 0;
};

}  // namespace fsdp2
