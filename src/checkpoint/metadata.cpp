#include "checkpoint/metadata_codec.h"
#include "checkpoint/storage.h"

#include <fsdp2/dcp_metadata.h>

#include <c10/util/Exception.h>

#include <functional>
#include <numeric>

namespace fsdp2::dcp {

int64_t StoredEntry::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

uint64_t StoredEntry::stored_bytes() const {
  uint64_t bytes = 0;
  for (const StoredChunk& chunk : chunks) bytes += chunk.place.length;
  return bytes;
}

const StoredEntry* Metadata::find(const std::string& key) const {
  const auto place = index_.find(key);
  return place == index_.end() ? nullptr : &entries[place->second];
}

StoredEntry& Metadata::add(StoredEntry entry) {
  const auto [place, added] = index_.emplace(entry.key, entries.size());
  TORCH_CHECK(added, "two entries of a checkpoint are called ", entry.key);
  entries.push_back(std::move(entry));
  return entries.back();
}

Metadata read_metadata(const std::string& where) {
  const files::Storage& storage = files::storage_of(where);
  const std::string folder = storage.follow(where), path = files::join(folder, ".metadata");
  const auto bytes = files::read_if_there(path);
  if (!bytes) {
    TORCH_CHECK(!storage.list(folder).empty(), "there is no checkpoint ", folder,
                storage.size(folder) ? ": it is not a folder" : "");
    TORCH_CHECK(!storage.size(files::join(folder, "__0.metadata")), folder,
                " was saved with use_collectives=False, one metadata file a rank, which is not "
                "supported: save it with collectives");
    TORCH_CHECK(false, folder,
                " is not a complete checkpoint: it has no .metadata, which is written last");
  }
  return decode(*bytes, path);
}

}  // namespace fsdp2::dcp
