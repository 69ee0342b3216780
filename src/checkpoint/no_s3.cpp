#include "checkpoint/storage.h"

#include <c10/util/Exception.h>

namespace fsdp2::files {

const Storage& s3_storage() {
  TORCH_CHECK(false,
              "fsdp2 is built without S3, which s3:// needs: configure with -DFSDP2_S3=ON and "
              "libcurl");
}

}  // namespace fsdp2::files
