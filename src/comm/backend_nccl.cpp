// The header is empty without this.
#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#endif

#include "comm/backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace fsdp2::comm {

bool nccl_is_built() { return true; }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendOptions& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  nccl->group_name = options.group_name;
  nccl->global_ranks_in_group.assign(options.global_ranks.begin(), options.global_ranks.end());
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(
      options.store, options.rank, static_cast<int>(options.global_ranks.size()), nccl);
}

}  // namespace fsdp2::comm
