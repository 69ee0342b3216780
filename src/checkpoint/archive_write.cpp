#include "checkpoint/archive.h"
#include "checkpoint/dtypes.h"
#include "checkpoint/file_io.h"
#include "checkpoint/objects.h"

#include <bit>
#include <caffe2/serialize/inline_container.h>

namespace fsdp2::dcp {

static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");

void write_archive(const std::string& pickle, const std::vector<torch::Tensor>& tensors,
                   const Sink& sink) {
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    sink(data, size);
    return size;
  });
  const auto put = [&](const char* name, std::string_view text) {
    writer.writeRecord(name, text.data(), text.size());
  };
  put("data.pkl", pickle);
  put(".format_version", "1");
  put(".storage_alignment", "64");
  put("byteorder", "little");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const size_t bytes = tensors[i].nbytes();
    writer.writeRecord("data/" + std::to_string(i), bytes > 0 ? tensors[i].const_data_ptr() : "",
                       bytes);
  }
  writer.writeEndOfFile();
}

void put_tensor(const torch::Tensor& tensor, size_t index, pickle::Writer& out) {
  const std::string storage = storage_class(tensor.scalar_type());
  const bool typed = !storage.empty();
  out.global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3").mark();
  out.mark().string("storage");
  if (typed) {
    out.global("torch", storage);
  } else {
    out.global("torch.storage", "UntypedStorage");
  }
  out.string(std::to_string(index)).string("cpu");
  out.integer(typed ? tensor.numel() : static_cast<int64_t>(tensor.nbytes()));
  out.tuple().persistent_id();
  out.integer(0).tuple_of(tensor.sizes().vec()).tuple_of(tensor.strides().vec()).boolean(false);
  out.global("collections", "OrderedDict").empty_tuple().reduce();
  if (!typed) out.global("torch", dtype_name(tensor.scalar_type()));
  out.tuple().reduce();
}

void write_tensor(const torch::Tensor& tensor, const Sink& sink) {
  pickle::Writer out;
  put_tensor(tensor, 0, out);
  write_archive(out.finish(), {tensor}, sink);
}

void write_object(const Value& value, const Sink& sink) {
  if (value.is<Pickled>()) {
    const std::string& archive = std::get<Pickled>(value.variant()).archive;
    return sink(archive.data(), archive.size());
  }
  write_archive(to_pickle(value), {}, sink);
}

}  // namespace fsdp2::dcp
