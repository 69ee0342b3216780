#pragma once

// One item of a checkpoint's data file: what torch.save writes, a zip archive of uncompressed
// records ("data.pkl", "data/0", ...).

#include "checkpoint/pickle_writer.h"
#include "checkpoint/storage.h"

#include <torch/types.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fsdp2::dcp {

class Value;

/// Where a record's bytes are, from the start of the file.
struct Record {
  uint64_t offset = 0, size = 0;
};
using Records = std::map<std::string, Record>;

/// The records of the archive that is `length` bytes at `offset` of `file`, their common folder
/// left out. Errors name the file; sizes are checked before anything is allocated.
Records read_records(const files::Readable& file, uint64_t offset, uint64_t length);

/// How a stored tensor lies in its record, in elements.
struct StoredTensor {
  torch::ScalarType dtype = torch::kFloat32;
  std::vector<int64_t> sizes, strides;
  int64_t storage_offset = 0, storage_numel = 0;
  Record data;
};
/// What the item says of the tensor that it holds, checked against the record's size.
StoredTensor read_stored_tensor(const files::Readable& file, uint64_t offset, uint64_t length);
/// The object that the item holds; a Pickled if C++ has no counterpart of it.
Value read_object(const files::Readable& file, uint64_t offset, uint64_t length);

/// Where an archive's bytes go.
using Sink = std::function<void(const void* data, size_t size)>;
/// `tensor`: plain, contiguous, on the CPU; its bytes go to the sink as one piece.
void write_tensor(const torch::Tensor& tensor, const Sink& sink);
void write_object(const Value& value, const Sink& sink);

/// What both are made of: the records of torch.save, in its order; and the call that makes a
/// contiguous tensor of the record "data/<index>".
void write_archive(const std::string& pickle, const std::vector<torch::Tensor>& tensors,
                   const Sink& sink);
void put_tensor(const torch::Tensor& tensor, size_t index, pickle::Writer& out);

}  // namespace fsdp2::dcp
