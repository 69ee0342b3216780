#pragma once

// State dicts as safetensors: one file, or a folder of several with an index
// (model.safetensors.index.json), as Hugging Face's hub has them. Straight from and into sharded
// parameters: no rank holds more than its shards and one whole tensor.

#include <fsdp2/dcp.h>
#include <fsdp2/safetensors.h>

#include <functional>
#include <string>

namespace fsdp2::safetensors {

/// What a tensor of the state dict is called in the files.
using NameMap = std::function<std::string(const std::string& name)>;

struct SaveFilesOptions {
  /// A file is closed before it grows beyond this; 5 GB, as Hugging Face's.
  uint64_t most_bytes = 5'000'000'000;
  Metadata metadata{{"format", "pt"}};
  NameMap name{};
};

/// Writes the tensors of a flat state dict (of get_model_state_dict, say) into `folder`: as
/// model.safetensors or, if that would grow too large, as model-00001-of-0000N.safetensors and an
/// index. Sharded tensors are gathered one by one; files are spread over the ranks. A tensor that
/// is there under several names is written under the first. Files take their names when they are
/// complete, the index last. Collective over the world; an error on one rank is raised on all.
void save_files(const dcp::StateDict& state, const std::string& folder,
                const SaveFilesOptions& options = {});
/// The same as one file, whatever its size.
void save_file(const dcp::StateDict& state, const std::string& path, const Metadata& metadata = {},
               const NameMap& name = {});

struct LoadFilesOptions {
  /// As dcp::LoadOptions.
  bool allow_partial = false;
  bool allow_narrowing = false;
  NameMap name{};
};

/// Fills the tensors of `state` in place from a file or a folder; a rank reads what its shards
/// need. A name that is missing is no error if another name of the same tensor is there. Errors as
/// of dcp::load, all before anything is written, on all ranks; a damaged or missing file is named.
/// Returned names are those in the files. Collective over the world.
dcp::LoadReport load_files(dcp::StateDict& state, const std::string& path,
                           const LoadFilesOptions& options = {});

}  // namespace fsdp2::safetensors
