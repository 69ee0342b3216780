#include "checkpoint/dtypes.h"
#include "checkpoint/metadata_codec.h"
#include "checkpoint/pickle_reader.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <tuple>

namespace fsdp2::dcp {
namespace {

using pickle::Kind;
using pickle::Malformed;
using pickle::Node;

using Fields = std::map<std::string_view, const Node*>;

class Decoder {
 public:
  explicit Decoder(const std::string& bytes) : tree_(bytes) {}

  Metadata run() {
    const Fields fields = object(tree_.root(), "Metadata");
    Metadata metadata;
    each(at(fields, "state_dict_metadata"), [&](const Node& key, const Node& value) {
      metadata.add(entry(std::string(text(key)), value));
    });
    paths(fields, metadata);
    places(at(fields, "storage_data"), metadata);
    if (const Node* meta = optional(fields, "storage_meta")) {
      const Fields of_meta = object(*meta, "StorageMeta");
      if (const Node* id = optional(of_meta, "save_id")) metadata.save_id = text(*id);
    }
    if (const Node* version = optional(fields, "version")) metadata.version = text(*version);
    return metadata;
  }

 private:
  template <class... Parts>
  static void check(bool sound, const Parts&... what) {
    if (!sound) throw Malformed(c10::str(what...));
  }
  static std::string_view text(const Node& node) {
    check(node.kind == Kind::kString, "a name is not a string");
    return node.text;
  }
  static int64_t count(const Node& node) {
    check(node.kind == Kind::kInt && node.integer >= 0, "a size is not a number");
    return node.integer;
  }
  template <class Body>
  void each(const Node& dict, Body&& body) const {
    check(dict.kind == Kind::kDict, "a dict is missing");
    for (size_t i = 0; i < dict.items.size(); i += 2) {
      body(tree_.item(dict, i), tree_.item(dict, i + 1));
    }
  }
  static const Node& at(const Fields& fields, std::string_view name) {
    const auto place = fields.find(name);
    check(place != fields.end(), "there is no ", name);
    return *place->second;
  }
  /// Null too if it is None.
  static const Node* optional(const Fields& fields, std::string_view name) {
    const auto place = fields.find(name);
    if (place == fields.end() || place->second->kind == Kind::kNone) return nullptr;
    return place->second;
  }

  const Node& state(const Node& node, std::string_view name) const {
    constexpr std::string_view modules[] = {"torch.distributed.checkpoint.metadata ",
                                            "torch.distributed.checkpoint.filesystem "};
    check(node.kind == Kind::kCall, "a ", name, " is missing");
    const Node& of = tree_.item(node, 0);
    check(of.kind == Kind::kGlobal &&
              std::any_of(std::begin(modules), std::end(modules),
                          [&](auto module) { return of.text == c10::str(module, name); }),
          "where a ", name, " should be there is a ", of.kind == Kind::kGlobal ? of.text : "value");
    check(node.items.size() == 3, "a ", name, " has no fields");
    return tree_.item(node, 2);
  }
  Fields object(const Node& node, std::string_view name) const {
    constexpr size_t most = 64;
    const Node& dict = state(node, name);
    check(dict.items.size() <= 2 * most, "a ", name, " has more than ", most, " fields");
    Fields fields;
    each(dict, [&](const Node& key, const Node& value) { fields[text(key)] = &value; });
    return fields;
  }
  bool is(const Node& node, std::string_view name) const {
    return node.kind == Kind::kCall && tree_.item(node, 0).kind == Kind::kGlobal &&
           tree_.item(node, 0).text.ends_with(c10::str(" ", name));
  }

  /// torch.Size((..)), or a plain tuple.
  std::vector<int64_t> size(const Node& node) const {
    const Node* tuple = &node;
    if (node.kind == Kind::kCall) {
      check(tree_.is_global(tree_.item(node, 0), "torch Size"), "a size is not a torch.Size");
      const Node& arguments = tree_.item(node, 1);
      check(arguments.kind == Kind::kTuple && arguments.items.size() <= 1,
            "a torch.Size is malformed");
      if (arguments.items.empty()) return {};
      tuple = &tree_.item(arguments, 0);
    }
    check((tuple->kind == Kind::kTuple || tuple->kind == Kind::kList) && tuple->items.size() <= 64,
          "a size is not a tuple");
    std::vector<int64_t> values;
    values.reserve(tuple->items.size());
    for (size_t i = 0; i < tuple->items.size(); ++i) {
      values.push_back(count(tree_.item(*tuple, i)));
    }
    return values;
  }

  torch::ScalarType dtype(const std::string& key, const Node& properties) const {
    const Node& fields = state(properties, "TensorProperties");
    check(fields.kind == Kind::kTuple && !fields.items.empty(), "TensorProperties are malformed");
    const Node& name = tree_.item(fields, 0);
    constexpr std::string_view module = "torch ";
    std::optional<torch::ScalarType> dtype;
    if (name.kind == Kind::kGlobal && name.text.starts_with(module)) {
      dtype = dtype_named(name.text.substr(module.size()));
    }
    if (!dtype) throw Malformed(c10::str(key, " has an unknown dtype"));
    return *dtype;
  }

  StoredEntry entry(std::string key, const Node& node) {
    StoredEntry entry;
    entry.key = std::move(key);
    if (is(node, "BytesStorageMetadata")) {
      entry.chunks.resize(1);
      return entry;
    }
    const Fields fields = object(node, "TensorStorageMetadata");
    entry.is_tensor = true;
    entry.dtype = dtype(entry.key, at(fields, "properties"));
    entry.sizes = size(at(fields, "size"));
    const Node& chunks = at(fields, "chunks");
    check(chunks.kind == Kind::kList, entry.key, " has no list of blocks");
    // A list may be mentioned often, and each of its blocks.
    blocks_ += chunks.items.size();
    check(blocks_ <= tree_.size(), "it mentions more blocks than it describes");
    entry.chunks.reserve(chunks.items.size());
    for (size_t i = 0; i < chunks.items.size(); ++i) {
      const Fields chunk = object(tree_.item(chunks, i), "ChunkStorageMetadata");
      entry.chunks.push_back({size(at(chunk, "offsets")), size(at(chunk, "sizes")), {}});
    }
    check_blocks(entry);
    return entry;
  }

  static int64_t volume(const StoredEntry& entry, const std::vector<int64_t>& sizes) {
    int64_t product = 1;
    for (const int64_t size : sizes) {
      check(!__builtin_mul_overflow(product, size, &product), entry.key, " has an impossible size");
    }
    return product;
  }
  static bool overlap(const StoredChunk& a, const StoredChunk& b) {
    for (size_t d = 0; d < a.sizes.size(); ++d) {
      if (a.offsets[d] >= b.offsets[d] + b.sizes[d] || b.offsets[d] >= a.offsets[d] + a.sizes[d]) {
        return false;
      }
    }
    return true;
  }
  /// The blocks are within the tensor, apart, and fill it.
  static void check_blocks(const StoredEntry& entry) {
    int64_t filled = 0;
    std::vector<const StoredChunk*> blocks;
    for (const StoredChunk& chunk : entry.chunks) {
      check(chunk.offsets.size() == entry.sizes.size() && chunk.sizes.size() == entry.sizes.size(),
            "a block of ", entry.key, " has another number of dimensions");
      for (size_t d = 0; d < entry.sizes.size(); ++d) {
        check(chunk.offsets[d] <= entry.sizes[d] &&
                  chunk.sizes[d] <= entry.sizes[d] - chunk.offsets[d],
              "a block of ", entry.key, " reaches outside of it");
      }
      const int64_t elements = volume(entry, chunk.sizes);
      if (elements == 0) continue;
      check(!__builtin_add_overflow(filled, elements, &filled), "blocks are too large");
      blocks.push_back(&chunk);
    }
    check(filled == volume(entry, entry.sizes), "the blocks of ", entry.key, " do not fill it");
    if (!entry.sizes.empty()) check_apart(entry.key, blocks);
  }
  /// Compares those that meet along the dimension that has the most cuts. Grids have few of them.
  static void check_apart(const std::string& key, std::vector<const StoredChunk*>& blocks) {
    const size_t d = most_cut(blocks);
    std::sort(blocks.begin(), blocks.end(),
              [&](const auto* a, const auto* b) { return a->offsets[d] < b->offsets[d]; });
    size_t left = 1'000'000 + 10'000 * blocks.size();
    for (size_t i = 0; i < blocks.size(); ++i) {
      const int64_t end = blocks[i]->offsets[d] + blocks[i]->sizes[d];
      for (size_t j = i + 1; j < blocks.size() && blocks[j]->offsets[d] < end; ++j) {
        check(!overlap(*blocks[i], *blocks[j]), "blocks of ", key, " overlap");
        check(left-- > 0, "the blocks of ", key, " are too entangled to be checked");
      }
    }
  }
  static size_t most_cut(const std::vector<const StoredChunk*>& blocks) {
    size_t best = 0, most = 0;
    std::vector<int64_t> starts(blocks.size());
    const size_t dimensions = blocks.empty() ? 0 : blocks[0]->offsets.size();
    for (size_t d = 0; d < dimensions; ++d) {
      for (size_t i = 0; i < blocks.size(); ++i) starts[i] = blocks[i]->offsets[d];
      std::sort(starts.begin(), starts.end());
      const auto cuts =
          static_cast<size_t>(std::unique(starts.begin(), starts.end()) - starts.begin());
      if (cuts > most) {
        best = d;
        most = cuts;
      }
    }
    return best;
  }

  /// Left out where they are not as DefaultSavePlanner writes them: the keys then stay flat.
  void paths(const Fields& fields, Metadata& metadata) const {
    const Node* data = optional(fields, "planner_data");
    if (data == nullptr || data->kind != Kind::kDict) return;
    std::unordered_map<std::string_view, const Node*> by_key;
    each(*data, [&](const Node& key, const Node& value) {
      if (key.kind == Kind::kString && value.kind == Kind::kTuple) by_key[key.text] = &value;
    });
    for (StoredEntry& entry : metadata.entries) {
      const auto place = by_key.find(entry.key);
      if (place == by_key.end()) continue;
      const Node& tuple = *place->second;
      check(tuple.items.size() <= 100, entry.key, " is nested too deep");
      entry.path = path(tuple, entry.key);
    }
  }
  /// Empty if it does not make the key.
  std::vector<PathPart> path(const Node& tuple, std::string_view key) const {
    std::vector<PathPart> path;
    for (size_t i = 0; i < tuple.items.size(); ++i) {
      const Node& part = tree_.item(tuple, i);
      const std::string number = part.kind == Kind::kInt ? std::to_string(count(part)) : "";
      const std::string_view name = part.kind == Kind::kInt ? number : text(part);
      if (i > 0 && !skip(key, ".")) return {};
      if (!skip(key, name)) return {};
      if (part.kind == Kind::kInt) {
        path.emplace_back(part.integer);
      } else {
        path.emplace_back(std::string(name));
      }
    }
    return key.empty() ? path : std::vector<PathPart>{};
  }
  static bool skip(std::string_view& text, std::string_view what) {
    if (!text.starts_with(what)) return false;
    text.remove_prefix(what.size());
    return true;
  }

  using Places = std::map<std::pair<std::string_view, std::vector<int64_t>>, Place>;
  void places(const Node& storage, Metadata& metadata) const {
    Places places;
    each(storage, [&](const Node& key, const Node& value) {
      const Fields index = object(key, "MetadataIndex");
      const Node* offset = optional(index, "offset");
      const Fields info = object(value, "_StorageInfo");
      Place place{std::string(text(at(info, "relative_path"))),
                  static_cast<uint64_t>(count(at(info, "offset"))),
                  static_cast<uint64_t>(count(at(info, "length")))};
      check(inside(place.file), "it names a file outside of the checkpoint, ", place.file);
      place.file = std::filesystem::path(place.file).lexically_normal().string();
      const Node* transforms = optional(info, "transform_descriptors");
      check(transforms == nullptr || transforms->items.empty(),
            "its files are compressed or encrypted by an extension");
      places.emplace(Places::key_type(text(at(index, "fqn")),
                                      offset == nullptr ? std::vector<int64_t>{} : size(*offset)),
                     std::move(place));
    });
    check_items(places);
    for (StoredEntry& entry : metadata.entries) {
      for (StoredChunk& chunk : entry.chunks) {
        const auto place = places.find({entry.key, chunk.offsets});
        const bool empty = std::count(chunk.sizes.begin(), chunk.sizes.end(), 0) > 0;
        check(place != places.end() || empty, "it does not say where a block of ", entry.key,
              " lies");
        if (place != places.end()) chunk.place = place->second;
      }
    }
  }
  /// Else a small file could be read as any number of large tensors.
  static void check_items(const Places& places) {
    std::vector<const Place*> items;
    items.reserve(places.size());
    for (const auto& [block, place] : places) {
      if (place.length > 0) items.push_back(&place);
    }
    std::sort(items.begin(), items.end(), [](const Place* a, const Place* b) {
      return std::tie(a->file, a->offset) < std::tie(b->file, b->offset);
    });
    for (size_t i = 1; i < items.size(); ++i) {
      const Place &before = *items[i - 1], &here = *items[i];
      check(before.file != here.file || before.offset + before.length <= here.offset,
            "two blocks lie at the same bytes of ", here.file, ", from ", here.offset, " on");
    }
  }
  static bool inside(const std::string& file) {
    constexpr size_t longest = 4096;  // as the system
    if (file.size() > longest) return false;
    const std::filesystem::path path(file);
    return !file.empty() && path.is_relative() && file.find('\0') == std::string::npos &&
           std::none_of(path.begin(), path.end(), [](const auto& part) { return part == ".."; });
  }

  const pickle::Tree tree_;
  size_t blocks_ = 0;
};

}  // namespace

Metadata decode(const std::string& bytes, const std::string& file) {
  try {
    return Decoder(bytes).run();
  } catch (const Malformed& error) {
    TORCH_CHECK(false, file, " is damaged: ", error.what());
  } catch (const pickle::Unsupported& error) {
    TORCH_CHECK(false, file, " holds what no checkpoint does: ", error.what());
  }
}

}  // namespace fsdp2::dcp
