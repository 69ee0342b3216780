#include "checkpoint/dtypes.h"
#include "checkpoint/metadata_codec.h"
#include "checkpoint/pickle_writer.h"

namespace fsdp2::dcp {
namespace {

constexpr const char* kMetadata = "torch.distributed.checkpoint.metadata";
constexpr const char* kFilesystem = "torch.distributed.checkpoint.filesystem";

/// The fields of a dataclass, written as its __dict__.
class Encoder {
 public:
  std::string run(const Metadata& metadata) {
    object(kMetadata, "Metadata", [&] {
      field("state_dict_metadata");
      dict([&] {
        for (const StoredEntry& entry : metadata.entries) {
          out_.string(entry.key);
          describe(entry);
        }
      });
      field("planner_data");
      dict([&] {
        for (const StoredEntry& entry : metadata.entries) {
          out_.string(entry.key);
          path(entry);
        }
      });
      field("storage_data");
      dict([&] {
        for (const StoredEntry& entry : metadata.entries) {
          for (size_t i = 0; i < entry.chunks.size(); ++i) {
            if (!entry.chunks[i].place.file.empty()) place(entry, i);
          }
        }
      });
      field("storage_meta");
      object(kMetadata, "StorageMeta", [&] {
        field("checkpoint_id").none();
        field("save_id").string(metadata.save_id);
        field("load_id").none();
        field("modules").empty_list();
      });
      field("version").string(metadata.version);
    });
    return out_.finish();
  }

 private:
  template <class Body>
  void dict(Body&& body) {
    out_.empty_dict().mark();
    body();
    out_.set_items();
  }
  template <class Body>
  void object(const char* module, const char* name, Body&& fields) {
    out_.global(module, name).empty_tuple().new_object();
    dict(fields);
    out_.build();
  }
  pickle::Writer& field(const char* name) { return out_.string(name); }
  void size(const std::vector<int64_t>& values) {
    out_.global("torch", "Size").mark().tuple_of(values).tuple().reduce();
  }

  void path(const StoredEntry& entry) {
    out_.mark();
    if (entry.path.empty()) out_.string(entry.key);
    for (const PathPart& part : entry.path) {
      if (const auto* name = std::get_if<std::string>(&part)) {
        out_.string(*name);
      } else {
        out_.integer(std::get<int64_t>(part));
      }
    }
    out_.tuple();
  }

  void describe(const StoredEntry& entry) {
    if (!entry.is_tensor) return object(kMetadata, "BytesStorageMetadata", [] {});
    object(kMetadata, "TensorStorageMetadata", [&] {
      field("properties");
      properties(entry.dtype);
      field("size");
      size(entry.sizes);
      field("chunks").empty_list().mark();
      for (const StoredChunk& chunk : entry.chunks) {
        object(kMetadata, "ChunkStorageMetadata", [&] {
          field("offsets");
          size(chunk.offsets);
          field("sizes");
          size(chunk.sizes);
        });
      }
      out_.appends();
    });
  }

  /// dtype, layout, requires_grad, memory format, pin_memory.
  void properties(torch::ScalarType dtype) {
    out_.global(kMetadata, "TensorProperties").empty_tuple().new_object().mark();
    out_.global("torch", dtype_name(dtype));
    out_.global("torch.serialization", "_get_layout").mark().string("torch.strided").tuple();
    out_.reduce().boolean(false);
    out_.global(kMetadata, "_MEM_FORMAT_ENCODING").tuple_of({0}).reduce();
    out_.boolean(false).tuple().build();
  }

  void place(const StoredEntry& entry, size_t index) {
    const StoredChunk& chunk = entry.chunks[index];
    object(kMetadata, "MetadataIndex", [&] {
      field("fqn").string(entry.key);
      field("index");
      if (entry.is_tensor) {
        out_.integer(static_cast<int64_t>(index));
        field("offset");
        size(chunk.offsets);
      } else {
        out_.none();
      }
    });
    object(kFilesystem, "_StorageInfo", [&] {
      field("relative_path").string(chunk.place.file);
      field("offset").integer(static_cast<int64_t>(chunk.place.offset));
      field("length").integer(static_cast<int64_t>(chunk.place.length));
    });
  }

  pickle::Writer out_;
};

}  // namespace

std::string encode(const Metadata& metadata) { return Encoder().run(metadata); }

}  // namespace fsdp2::dcp
