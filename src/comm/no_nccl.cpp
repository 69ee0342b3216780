#include "comm/backend.h"

#include <c10/util/Exception.h>

namespace fsdp2::comm {

bool nccl_is_built() { return false; }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendOptions&) {
  TORCH_CHECK(false,
              "backend 'nccl' is not built: the libtorch that fsdp2 was built with has no CUDA, or "
              "nccl.h was not "
              "found; use 'gloo', or build against a CUDA libtorch");
}

}  // namespace fsdp2::comm
