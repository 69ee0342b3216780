#include "checkpoint/archive.h"
#include "checkpoint/dtypes.h"
#include "checkpoint/file_io.h"
#include "checkpoint/objects.h"
#include "checkpoint/pickle_reader.h"

#include <fsdp2/dcp.h>

#include <algorithm>
#include <cstring>

namespace fsdp2::dcp {
namespace {

// Field offsets of PKWARE's APPNOTE.TXT.
constexpr uint32_t kEndMagic = 0x06054b50, kEnd64Magic = 0x06064b50, kLocatorMagic = 0x07064b50,
                   kEntryMagic = 0x02014b50, kLocalMagic = 0x04034b50;
constexpr uint64_t kEndSize = 22, kEnd64Size = 56, kLocatorSize = 20, kEntrySize = 46,
                   kLocalSize = 30;
constexpr uint64_t kMostRecords = 100'000, kLargestDirectory = uint64_t{16} * 1024 * 1024,
                   kLargestPickle = uint64_t{1024} * 1024 * 1024;

template <class T>
T field(const std::string& bytes, uint64_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

/// An archive inside of a file; positions count from the archive's start.
struct Item {
  const files::Readable& file;
  uint64_t start, length;

  [[noreturn]] void fail(const std::string& what) const {
    TORCH_CHECK(false, file.path(), ": the item at byte ", start, " is damaged: ", what);
  }
  void check(bool sound, const char* what) const {
    if (!sound) fail(what);
  }
  std::string read(uint64_t at, uint64_t count) const {
    check(at <= length && count <= length - at, "it points outside of itself");
    std::string bytes(count, '\0');
    file.read(start + at, bytes.data(), count);
    return bytes;
  }
};

struct Directory {
  uint64_t offset = 0, size = 0, records = 0;
};

Directory find_directory(const Item& item) {
  item.check(item.length >= kEndSize, "it is too short for an archive");
  const uint64_t end_at = item.length - kEndSize;
  const uint64_t tail_at = end_at > kLocatorSize ? end_at - kLocatorSize : 0;
  const std::string tail = item.read(tail_at, item.length - tail_at);
  const uint64_t end = end_at - tail_at;
  item.check(field<uint32_t>(tail, end) == kEndMagic, "its end is not that of a zip archive");
  Directory directory{field<uint32_t>(tail, end + 16), field<uint32_t>(tail, end + 12),
                      field<uint16_t>(tail, end + 10)};
  if (end == kLocatorSize && field<uint32_t>(tail, 0) == kLocatorMagic) {
    const std::string end64 = item.read(field<uint64_t>(tail, 8), kEnd64Size);
    item.check(field<uint32_t>(end64, 0) == kEnd64Magic, "its zip64 end is not one");
    directory = {field<uint64_t>(end64, 48), field<uint64_t>(end64, 40),
                 field<uint64_t>(end64, 32)};
  }
  item.check(directory.records <= kMostRecords && directory.size <= kLargestDirectory,
             "its directory is implausibly large");
  return directory;
}

/// The values that a directory entry keeps in its zip64 field because they need more than 32 bits.
void read_zip64(const Item& item, const std::string& extra, uint64_t& size, uint64_t& packed,
                uint64_t& offset) {
  constexpr uint64_t elsewhere = 0xffffffff;
  uint64_t at = 0;
  while (at + 4 <= extra.size()) {
    const uint64_t end = at + 4 + field<uint16_t>(extra, at + 2);
    item.check(end <= extra.size(), "a zip field is cut short");
    if (field<uint16_t>(extra, at) == 1) {
      at += 4;
      for (uint64_t* value : {&size, &packed, &offset}) {
        if (*value != elsewhere) continue;
        item.check(at + 8 <= end, "a zip64 field is cut short");
        *value = field<uint64_t>(extra, at);
        at += 8;
      }
      return;
    }
    at = end;
  }
}

}  // namespace

Records read_records(const files::Readable& file, uint64_t offset, uint64_t length) {
  TORCH_CHECK(offset <= file.size() && length <= file.size() - offset, file.path(),
              " is cut short: it has ", file.size(), " bytes, an item is to be at ", offset, " to ",
              offset + length);
  const Item item{file, offset, length};
  const Directory directory = find_directory(item);
  const std::string entries = item.read(directory.offset, directory.size);
  Records records;
  std::vector<std::pair<uint64_t, uint64_t>> spans;
  spans.reserve(directory.records);
  uint64_t at = 0;
  for (uint64_t i = 0; i < directory.records; ++i) {
    item.check(at + kEntrySize <= entries.size(), "its directory is cut short");
    item.check(field<uint32_t>(entries, at) == kEntryMagic, "its directory is not one");
    item.check(field<uint16_t>(entries, at + 10) == 0, "a record is compressed");
    uint64_t packed = field<uint32_t>(entries, at + 20), size = field<uint32_t>(entries, at + 24),
             local = field<uint32_t>(entries, at + 42);
    const uint64_t name_size = field<uint16_t>(entries, at + 28),
                   extra_size = field<uint16_t>(entries, at + 30),
                   comment_size = field<uint16_t>(entries, at + 32);
    item.check(at + kEntrySize + name_size + extra_size + comment_size <= entries.size(),
               "its directory is cut short");
    const std::string name = entries.substr(at + kEntrySize, name_size);
    read_zip64(item, entries.substr(at + kEntrySize + name_size, extra_size), size, packed, local);
    item.check(packed == size, "a record is compressed");
    at += kEntrySize + name_size + extra_size + comment_size;

    const std::string header = item.read(local, kLocalSize);
    item.check(field<uint32_t>(header, 0) == kLocalMagic, "a record's header is not one");
    const uint64_t data =
        local + kLocalSize + field<uint16_t>(header, 26) + uint64_t{field<uint16_t>(header, 28)};
    item.check(data <= length && size <= length - data, "a record reaches outside of it");
    if (size > 0) spans.emplace_back(data, data + size);
    const size_t slash = name.find('/');
    item.check(slash != std::string::npos, "a record lies outside of the archive's folder");
    item.check(records.emplace(name.substr(slash + 1), Record{offset + data, size}).second,
               "two records have one name");
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    item.check(spans[i - 1].second <= spans[i].first, "two records overlap");
  }
  return records;
}

namespace {

struct Contents {
  Records records;
  std::string pickle;
};

Contents read_contents(const files::Readable& file, uint64_t offset, uint64_t length) {
  Contents contents{read_records(file, offset, length), {}};
  const Item item{file, offset, length};
  const auto record = contents.records.find("data.pkl");
  item.check(record != contents.records.end(), "it has no data.pkl");
  item.check(record->second.size <= kLargestPickle, "its data.pkl is implausibly large");
  contents.pickle.resize(record->second.size);
  file.read(record->second.offset, contents.pickle.data(), contents.pickle.size());
  const auto order = contents.records.find("byteorder");
  if (order != contents.records.end()) {
    std::string text(std::min<uint64_t>(order->second.size, 16), '\0');
    file.read(order->second.offset, text.data(), text.size());
    item.check(text == "little", "its bytes are in the order of another kind of machine");
  }
  return contents;
}

/// A tuple of sizes, or the like.
std::vector<int64_t> integers(const Item& item, const pickle::Tree& tree,
                              const pickle::Node& node) {
  item.check(node.kind == pickle::Kind::kTuple && node.items.size() <= 64,
             "a size is not a tuple of numbers");
  std::vector<int64_t> values;
  for (size_t i = 0; i < node.items.size(); ++i) {
    const pickle::Node& value = tree.item(node, i);
    item.check(value.kind == pickle::Kind::kInt && value.integer >= 0,
               "a size is not a tuple of numbers");
    values.push_back(value.integer);
  }
  return values;
}

/// One past the last element that sizes and strides reach.
int64_t reach(const Item& item, const StoredTensor& tensor) {
  int64_t last = tensor.storage_offset;
  for (size_t i = 0; i < tensor.sizes.size(); ++i) {
    if (tensor.sizes[i] == 0) return 0;
    int64_t step = 0;
    item.check(!__builtin_mul_overflow(tensor.sizes[i] - 1, tensor.strides[i], &step) &&
                   !__builtin_add_overflow(last, step, &last),
               "its tensor has impossible strides");
  }
  item.check(!__builtin_add_overflow(last, 1, &last), "its tensor has impossible strides");
  return last;
}

StoredTensor parse_tensor(const Item& item, const Contents& contents, const pickle::Tree& tree,
                          const pickle::Node& root) {
  using pickle::Kind;
  const char* const no_tensor = "it does not hold a tensor";
  item.check(root.kind == Kind::kCall && root.items.size() == 2, no_tensor);
  const pickle::Node& function = tree.item(root, 0);
  const bool typed = tree.is_global(function, "torch._utils _rebuild_tensor_v2");
  item.check(typed || tree.is_global(function, "torch._utils _rebuild_tensor_v3"), no_tensor);
  const pickle::Node& arguments = tree.item(root, 1);
  item.check(arguments.kind == Kind::kTuple && arguments.items.size() >= (typed ? 6 : 7),
             no_tensor);

  const pickle::Node& persistent = tree.item(arguments, 0);
  item.check(persistent.kind == Kind::kPersistent, "its tensor has no storage");
  const pickle::Node& id = tree.item(persistent, 0);
  item.check(id.kind == Kind::kTuple && id.items.size() == 5, "its tensor has no storage");
  const pickle::Node& storage = tree.item(id, 1);
  const pickle::Node& key = tree.item(id, 2);
  const pickle::Node& count = tree.item(id, 4);
  const pickle::Node& start = tree.item(arguments, 1);
  item.check(storage.kind == Kind::kGlobal && key.kind == Kind::kString &&
                 count.kind == Kind::kInt && start.kind == Kind::kInt && start.integer >= 0,
             "its tensor has no storage");

  StoredTensor tensor;
  std::optional<torch::ScalarType> dtype;
  if (typed) {
    constexpr std::string_view module = "torch ";
    if (storage.text.starts_with(module)) {
      dtype = dtype_of_storage(storage.text.substr(module.size()));
    }
  } else {
    const pickle::Node& named = tree.item(arguments, 6);
    constexpr std::string_view module = "torch ";
    if (named.kind == Kind::kGlobal && named.text.starts_with(module)) {
      dtype = dtype_named(named.text.substr(module.size()));
    }
  }
  if (!dtype) item.fail("its tensor has an unknown dtype");
  tensor.dtype = *dtype;
  tensor.sizes = integers(item, tree, tree.item(arguments, 2));
  tensor.strides = integers(item, tree, tree.item(arguments, 3));
  item.check(tensor.sizes.size() == tensor.strides.size(), "its tensor has impossible strides");
  tensor.storage_offset = start.integer;

  const auto element = static_cast<uint64_t>(c10::elementSize(tensor.dtype));
  const auto record = contents.records.find(c10::str("data/", key.text));
  if (record != contents.records.end()) tensor.data = record->second;
  tensor.storage_numel = static_cast<int64_t>(tensor.data.size / element);
  item.check(reach(item, tensor) <= tensor.storage_numel, "its tensor is larger than its bytes");
  return tensor;
}

}  // namespace

StoredTensor read_stored_tensor(const files::Readable& file, uint64_t offset, uint64_t length) {
  const Item item{file, offset, length};
  const Contents contents = read_contents(file, offset, length);
  try {
    const pickle::Tree tree(contents.pickle);
    return parse_tensor(item, contents, tree, tree.root());
  } catch (const pickle::Malformed& error) {
    item.fail(error.what());
  } catch (const pickle::Unsupported& error) {
    item.fail(c10::str("it does not hold a tensor, but ", error.what()));
  }
}

Value read_object(const files::Readable& file, uint64_t offset, uint64_t length) {
  const Item item{file, offset, length};
  const Contents contents = read_contents(file, offset, length);
  try {
    const pickle::Tree tree(contents.pickle);
    return value_of(tree);
  } catch (const pickle::Malformed& error) {
    item.fail(error.what());
  } catch (const pickle::Unsupported& error) {
    return Pickled{item.read(0, length), error.what()};
  }
}

Value read_torch_file(const std::string& path) {
  const files::ReadFile file(path);
  const Item item{file, 0, file.size()};
  const Contents contents = read_contents(file, 0, file.size());
  try {
    const pickle::Tree tree(contents.pickle);
    std::map<uint64_t, torch::Tensor> storages;  // by place: tensors share them, as in Python
    return value_of(tree, [&](const pickle::Node& node) {
      const StoredTensor stored = parse_tensor(item, contents, tree, node);
      torch::Tensor& bytes = storages[stored.data.offset];
      if (!bytes.defined()) {
        bytes = torch::empty({static_cast<int64_t>(stored.data.size)}, torch::kUInt8);
        file.read(stored.data.offset, bytes.mutable_data_ptr(), stored.data.size);
      }
      const auto element = static_cast<int64_t>(c10::elementSize(stored.dtype));
      return bytes.narrow(0, 0, stored.storage_numel * element)
          .view(stored.dtype)
          .as_strided(stored.sizes, stored.strides, stored.storage_offset);
    });
  } catch (const pickle::Malformed& error) {
    item.fail(error.what());
  } catch (const pickle::Unsupported& error) {
    TORCH_CHECK(false, path, " holds what C++ has no counterpart of: ", error.what());
  }
}

}  // namespace fsdp2::dcp
