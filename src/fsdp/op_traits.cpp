#include "fsdp/op_traits.h"

#include <string_view>
#include <unordered_map>

namespace fsdp2::fsdp {

uint32_t op_traits(const c10::FunctionSchema& schema) {
  const std::string_view name = schema.name();
  // Collectives write to, or send from another thread, what they are given.
  if (name.starts_with("c10d::")) return kHiddenWrite;
  static const std::unordered_map<std::string_view, uint32_t> traits = {
      {"aten::empty_like", kSizesOnly},
      {"aten::zeros_like", kSizesOnly},
      {"aten::ones_like", kSizesOnly},
      {"aten::full_like", kSizesOnly},
      {"aten::rand_like", kSizesOnly},
      {"aten::randn_like", kSizesOnly},
      {"aten::randint_like", kSizesOnly},
      {"aten::new_empty", kSizesOnly},
      {"aten::new_empty_strided", kSizesOnly},
      {"aten::new_full", kSizesOnly},
      {"aten::new_ones", kSizesOnly},
      {"aten::new_zeros", kSizesOnly},
      {"aten::is_same_size", kSizesOnly},
      // Another tensor would take over storage that comes and goes.
      {"aten::set_", kHiddenWrite},
      {"aten::set", kHiddenWrite},
      {"aten::embedding_renorm_", kWritesByData},
      {"aten::native_batch_norm", kWritesRunningStatistics},
      {"aten::cudnn_batch_norm", kWritesRunningStatistics},
      {"aten::miopen_batch_norm", kWritesRunningStatistics},
      {"aten::_sparse_coo_tensor_with_dims_and_tensors", kOpaqueAlias},
      {"aten::_sparse_coo_tensor_unsafe", kOpaqueAlias},
      {"aten::_sparse_compressed_tensor_with_dims", kOpaqueAlias},
      {"aten::_sparse_compressed_tensor_unsafe", kOpaqueAlias},
      {"aten::_sparse_csr_tensor_unsafe", kOpaqueAlias},
      {"aten::sparse_compressed_tensor", kOpaqueAlias},
      {"aten::_nested_view_from_buffer", kOpaqueAlias},
      {"aten::record_stream", kNoWrite},
      {"aten::rms_norm", kComputesWider},
      {"aten::max_pool1d", kReadsEarly},
      {"aten::_saturate_weight_to_fp16", kReadsEarly},
      {"aten::fbgemm_linear_quantize_weight", kReadsEarly},
      {"aten::choose_qparams_optimized", kReadsEarly},
      {"aten::_pad_packed_sequence", kReadsEarly},
      {"aten::tensor_split", kReadsEarly},
  };
  const auto found = traits.find(name);
  return found == traits.end() ? 0 : found->second;
}

}  // namespace fsdp2::fsdp
