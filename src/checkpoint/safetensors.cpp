#include "checkpoint/mapped_file.h"

#include <fsdp2/safetensors.h>

#include <torch/torch.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <unistd.h>
#include <unordered_map>

namespace fsdp2::safetensors {
namespace {

using Json = nlohmann::ordered_json;
static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr uint64_t kMaxHeader = 100'000'000;  // as the reference implementation
constexpr const char* kMetadataKey = "__metadata__";

const std::pair<const char*, torch::ScalarType> kDtypes[] = {
    {"F64", torch::kFloat64},
    {"F32", torch::kFloat32},
    {"F16", torch::kFloat16},
    {"BF16", torch::kBFloat16},
    {"F8_E4M3", torch::kFloat8_e4m3fn},
    {"F8_E5M2", torch::kFloat8_e5m2},
    {"I64", torch::kInt64},
    {"I32", torch::kInt32},
    {"I16", torch::kInt16},
    {"I8", torch::kInt8},
    {"U8", torch::kUInt8},
    {"U16", torch::kUInt16},
    {"U32", torch::kUInt32},
    {"U64", torch::kUInt64},
    {"BOOL", torch::kBool},
    {"C64", torch::kComplexFloat},
};

const char* dtype_name(const Entry& entry) {
  for (const auto& [name, dtype] : kDtypes) {
    if (dtype == entry.dtype) return name;
  }
  TORCH_CHECK_TYPE(false, "safetensors cannot hold ", entry.name, " of dtype ",
                   c10::toString(entry.dtype));
}

std::optional<torch::ScalarType> dtype_of(const std::string& name) {
  for (const auto& [known, dtype] : kDtypes) {
    if (name == known) return dtype;
  }
  return std::nullopt;
}

uint64_t byte_count(const Entry& entry, const std::string& file) {
  auto bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
  bool empty = false;
  for (const int64_t size : entry.sizes) {
    empty = empty || size == 0;  // of which the strides must fit too
    TORCH_CHECK(size >= 0 && !__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes),
                file, ": ", entry.name, " has an impossible size ", c10::IntArrayRef(entry.sizes));
  }
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

Json parse_header(const std::string& file, const char* begin, const char* end) {
  std::set<std::string> names;
  std::string twice;
  const auto note_key = [&](int depth, Json::parse_event_t event, Json& value) {
    // An entry's lists are at depth 2; each bracket in brackets would take a hundred bytes.
    TORCH_CHECK(depth <= 2 || (event != Json::parse_event_t::object_start &&
                               event != Json::parse_event_t::array_start),
                file, ": the safetensors header is nested too deep");
    if (depth == 1 && event == Json::parse_event_t::key &&
        !names.insert(value.get<std::string>()).second) {
      twice = value.get<std::string>();
    }
    return true;
  };
  Json header;
  try {
    header = Json::parse(begin, end, note_key);
  } catch (const Json::exception& error) {
    TORCH_CHECK(false, file, ": the safetensors header is not valid JSON: ", error.what());
  }
  TORCH_CHECK(header.is_object(), file, ": the safetensors header is not a JSON object");
  TORCH_CHECK(twice.empty(), file, ": two tensors are called ", twice);
  return header;
}

/// Sizes and offsets. JSON's other numbers would be cut to fit.
std::vector<int64_t> integers(const Json& list, const std::string& entry) {
  std::vector<int64_t> numbers;
  numbers.reserve(list.size());
  for (const Json& number : list.get_ref<const Json::array_t&>()) {
    const bool fits = number.is_number_unsigned() ? number.get<uint64_t>() <= INT64_MAX
                                                  : number.is_number_integer();
    TORCH_CHECK(fits, entry, " is malformed: a size is no integer of 64 bits");
    numbers.push_back(number.get<int64_t>());
  }
  return numbers;
}

}  // namespace

struct Reader::Impl {
  explicit Impl(const std::string& path)
      : path(path), file(std::make_shared<files::MappedFile>(path)) {}

  std::string path;
  std::shared_ptr<files::MappedFile> file;
  std::vector<Entry> entries;
  Metadata metadata;
  struct Place {
    size_t index = 0;
    uint64_t offset = 0;
  };
  std::unordered_map<std::string, Place> places;
};

Reader::Reader(const std::string& path) {
  auto impl = std::make_shared<Impl>(path);
  const auto& file = *impl->file;
  uint64_t length = 0;
  TORCH_CHECK(file.size() >= sizeof(length), path, ": too short for a safetensors file (",
              file.size(), " bytes)");
  std::memcpy(&length, file.data(), sizeof(length));
  TORCH_CHECK(length <= kMaxHeader && length <= file.size() - sizeof(length), path,
              ": not a safetensors file, or cut short (header of ", length, " bytes in a file of ",
              file.size(), ")");
  const uint64_t data_start = sizeof(length) + length;
  const uint64_t data_size = file.size() - data_start;
  const Json header = parse_header(path, file.data() + sizeof(length), file.data() + data_start);

  struct Span {
    uint64_t begin, end;
    Entry entry;
  };
  std::vector<Span> spans;
  for (const auto& [name, value] : header.items()) {
    const std::string what = c10::str(path, ": the safetensors header's entry ", name);
    try {
      if (name == kMetadataKey) {
        impl->metadata = value.get<Metadata>();
        continue;
      }
      const auto dtype = dtype_of(value.at("dtype").get<std::string>());
      TORCH_CHECK(dtype, path, ": ", name, " has the unknown dtype ",
                  value.at("dtype").get<std::string>());
      const auto offsets = integers(value.at("data_offsets"), what);
      TORCH_CHECK(offsets.size() == 2 && offsets[0] >= 0 && offsets[1] >= offsets[0], what,
                  " has impossible offsets ", c10::IntArrayRef(offsets));
      spans.push_back({static_cast<uint64_t>(offsets[0]),
                       static_cast<uint64_t>(offsets[1]),
                       {name, *dtype, integers(value.at("shape"), what)}});
    } catch (const Json::exception& error) {
      TORCH_CHECK(false, what, " is malformed: ", error.what());
    }
  }
  std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t next = 0;
  for (auto& span : spans) {
    const uint64_t bytes = byte_count(span.entry, path);
    TORCH_CHECK(span.begin == next && span.end - span.begin == bytes, path, ": ", span.entry.name,
                " should take ", bytes, " bytes from ", next, " on, but the header says ",
                span.begin, " to ", span.end);
    next = span.end;
    impl->places[span.entry.name] = {impl->entries.size(), data_start + span.begin};
    impl->entries.push_back(std::move(span.entry));
  }
  TORCH_CHECK(next == data_size, path, ": the header describes ", next,
              " bytes of tensors, the file has ", data_size,
              next > data_size ? " (cut short?)" : "");
  impl_ = std::move(impl);
}

const std::vector<Entry>& Reader::entries() const { return impl_->entries; }
const Metadata& Reader::metadata() const { return impl_->metadata; }
bool Reader::contains(const std::string& name) const { return impl_->places.count(name) != 0; }

torch::Tensor Reader::read(const std::string& name) const {
  const auto place = impl_->places.find(name);
  TORCH_CHECK_VALUE(place != impl_->places.end(), impl_->path, ": there is no tensor called ",
                    name);
  const Entry& entry = impl_->entries[place->second.index];
  char* bytes = impl_->file->data() + place->second.offset;
  const auto options = torch::TensorOptions(entry.dtype);
  const bool aligned = place->second.offset % c10::elementSize(entry.dtype) == 0;
  if (!aligned) {
    auto copy = torch::empty(entry.sizes, options);
    if (copy.nbytes() > 0) std::memcpy(copy.data_ptr(), bytes, copy.nbytes());
    return copy;
  }
  return torch::from_blob(bytes, entry.sizes, [keep = impl_->file](void*) {}, options);
}

struct Writer::Impl {
  ~Impl() {
    if (file < 0) return;
    ::close(file);
    ::unlink(temporary.c_str());
  }

  std::string path, temporary;
  std::vector<Entry> entries;
  size_t next = 0;
  int file = -1;

  void put(const void* data, size_t size) const {
    const char* at = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t done = ::write(file, at, size);
      if (done < 0 && errno == EINTR) continue;
      TORCH_CHECK(done > 0, "cannot write ", temporary, ": ", std::strerror(errno));
      at += done;
      size -= static_cast<size_t>(done);
    }
  }
};

Writer::Writer(const std::string& path, const std::vector<Entry>& entries, const Metadata& metadata)
    : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  impl_->temporary = path + ".tmp";
  impl_->entries = entries;
  Json header = Json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  uint64_t offset = 0;
  for (const auto& entry : entries) {
    TORCH_CHECK_VALUE(entry.name != kMetadataKey && !header.contains(entry.name), path,
                      ": two tensors are called ", entry.name);
    const uint64_t end = offset + byte_count(entry, path);
    header[entry.name] = {
        {"dtype", dtype_name(entry)}, {"shape", entry.sizes}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  impl_->file = ::open(impl_->temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  TORCH_CHECK(impl_->file >= 0, "cannot create ", impl_->temporary, ": ", std::strerror(errno));
  impl_->put(&length, sizeof(length));
  impl_->put(text.data(), text.size());
}

Writer::~Writer() = default;

void Writer::write(const torch::Tensor& tensor) {
  TORCH_CHECK(impl_->next < impl_->entries.size(), impl_->path, ": all ", impl_->next,
              " tensors are written");
  const Entry& entry = impl_->entries[impl_->next];
  TORCH_CHECK_VALUE(tensor.sizes() == entry.sizes && tensor.scalar_type() == entry.dtype,
                    impl_->path, ": ", entry.name, " was announced as ", entry.dtype, " ",
                    c10::IntArrayRef(entry.sizes), ", got ", tensor.scalar_type(), " ",
                    tensor.sizes());
  const auto bytes = tensor.detach().cpu().contiguous();
  impl_->put(bytes.const_data_ptr(), bytes.nbytes());
  ++impl_->next;
}

void Writer::commit() {
  TORCH_CHECK(impl_->next == impl_->entries.size(), impl_->path, ": only ", impl_->next, " of ",
              impl_->entries.size(), " tensors were written");
  TORCH_CHECK(::fsync(impl_->file) == 0, "cannot flush ", impl_->temporary, ": ",
              std::strerror(errno));
  ::close(std::exchange(impl_->file, -1));
  std::filesystem::rename(impl_->temporary, impl_->path);
}

void save(const std::string& path,
          const std::vector<std::pair<std::string, torch::Tensor>>& tensors,
          const Metadata& metadata) {
  std::vector<Entry> entries;
  entries.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors)
    entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  Writer writer(path, entries, metadata);
  for (const auto& [name, tensor] : tensors) writer.write(tensor);
  writer.commit();
}

}  // namespace fsdp2::safetensors
