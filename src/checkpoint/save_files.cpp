#include "checkpoint/save_files.h"

#include "checkpoint/archive.h"
#include "checkpoint/checksums.h"
#include "checkpoint/digest.h"
#include "checkpoint/metadata_codec.h"
#include "checkpoint/storage.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <unistd.h>
#include <unordered_map>

namespace fsdp2::dcp {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetadataFile = ".metadata";

std::string data_file(int rank, int64_t number) {
  return c10::str("__", rank, "_", number, ".distcp");
}

/// N of "__<rank>_<N>.distcp"; -1 if that is not its name.
int64_t file_number(const std::string& name) {
  const size_t at = name.find('_', 2);
  if (!name.starts_with("__") || at == std::string::npos || !name.ends_with(".distcp")) return -1;
  int64_t number = -1;
  std::from_chars(name.data() + at + 1, name.data() + name.size(), number);
  return number;
}

std::string new_save_id() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 4; ++i) id += c10::str(std::hex, std::setw(8), std::setfill('0'), random());
  for (const size_t at : {8U, 13U, 18U, 23U}) id.insert(at, "-");
  return id;
}

/// Files of one save have numbers above those that are there, so that nothing is overwritten.
struct Start {
  std::string save_id;
  int64_t first_file = 0;
};

Start prepare(const std::string& folder, const Exchange& exchange) {
  const auto answers = exchange.all([&] {
    files::storage_of(folder).make_folder(folder);
    if (exchange.rank() != 0) return std::string();
    int64_t first = 0;
    for (const std::string& name : files::storage_of(folder).list(folder)) {
      first = std::max(first, file_number(name) + 1);
    }
    return Json{new_save_id(), first}.dump();
  });
  const Json json = Json::parse(answers[0]);
  return {json[0].get<std::string>(), json[1].get<int64_t>()};
}

struct WriteItem {
  size_t entry, block;
  const SaveLeaf* leaf;
  uint64_t bytes;
};
struct Written {
  size_t entry = 0, block = 0;
  Place place;
  uint64_t digest = 0;
};

/// This rank's items, spread over at most `threads` lists of about the same size.
std::vector<std::vector<WriteItem>> share(const SaveJob& job, int rank) {
  std::unordered_map<std::string_view, const SaveLeaf*> leaves;
  for (const SaveLeaf& leaf : job.leaves) leaves[leaf.key] = &leaf;
  std::vector<WriteItem> items;
  for (size_t e = 0; e < job.plan->entries.size(); ++e) {
    const StoredEntry& entry = job.plan->entries[e];
    for (size_t b = 0; b < entry.chunks.size(); ++b) {
      if (job.plan->owners[e][b] != rank) continue;
      const Block block{entry.chunks[b].offsets, entry.chunks[b].sizes};
      const SaveLeaf* leaf = leaves.at(entry.key);
      const uint64_t bytes =
          entry.is_tensor ? static_cast<uint64_t>(block.numel()) * c10::elementSize(entry.dtype)
                          : leaf->bytes();
      items.push_back({e, b, leaf, bytes});
    }
  }
  std::vector<std::vector<WriteItem>> lists(static_cast<size_t>(job.threads));
  std::vector<uint64_t> load(lists.size());
  for (const WriteItem& item : items) {
    const auto least =
        static_cast<size_t>(std::min_element(load.begin(), load.end()) - load.begin());
    lists[least].push_back(item);
    load[least] += item.bytes + 1;
  }
  std::erase_if(lists, [](const auto& list) { return list.empty(); });
  return lists;
}

std::vector<Written> write_file(const SaveJob& job, const std::vector<WriteItem>& items,
                                const std::string& name) {
  torch::NoGradGuard no_grad;
  const auto file = files::storage_of(job.folder).create(files::join(job.folder, name));
  std::vector<Written> written;
  for (const WriteItem& item : items) {
    Written done{item.entry, item.block, {name, file->size(), 0}, 0};
    files::Digest digest;
    const Sink sink = [&](const void* data, size_t size) {
      digest.add(data, size);
      file->write(data, size);
    };
    if (item.leaf->is_tensor()) {
      const StoredChunk& chunk = job.plan->entries[item.entry].chunks[item.block];
      const torch::Tensor part =
          view_of(item.leaf->data, item.leaf->block, {chunk.offsets, chunk.sizes});
      write_tensor(part.cpu().contiguous(), sink);
    } else {
      sink(item.leaf->archive.data(), item.leaf->archive.size());
    }
    done.place.length = file->size() - done.place.offset;
    done.digest = digest.value();
    written.push_back(std::move(done));
  }
  file->sync();
  return written;
}

std::vector<Written> write_files(const SaveJob& job, const Exchange& exchange, const Start& start) {
  const auto lists = share(job, exchange.rank());
  std::vector<std::vector<Written>> written(lists.size());
  std::vector<std::function<void()>> jobs;
  jobs.reserve(lists.size());
  for (size_t i = 0; i < lists.size(); ++i) {
    jobs.emplace_back([&, i] {
      written[i] = write_file(
          job, lists[i], data_file(exchange.rank(), start.first_file + static_cast<int64_t>(i)));
    });
  }
  in_threads(jobs);
  files::storage_of(job.folder).sync_folder(job.folder);
  std::vector<Written> all;
  for (auto& part : written) all.insert(all.end(), part.begin(), part.end());
  return all;
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

std::string report(const std::vector<Written>& written) {
  Json items = Json::array();
  for (const Written& item : written) {
    items.push_back({item.entry, item.block, item.place.file, item.place.offset, item.place.length,
                     item.digest});
  }
  return Json{host_name(), items}.dump();
}

/// What all ranks wrote, as metadata; checks that the files are to be seen from here.
Metadata collect(const SaveJob& job, const std::vector<std::string>& reports,
                 const Exchange& exchange, Checksums& checksums) {
  Metadata metadata;
  for (const StoredEntry& entry : job.plan->entries) metadata.add(entry);
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const Json json = Json::parse(reports[rank]);
    std::map<std::string, uint64_t> sizes;
    for (const Json& item : json[1]) {
      const Place place{item[2].get<std::string>(), item[3].get<uint64_t>(),
                        item[4].get<uint64_t>()};
      metadata.entries[item[0].get<size_t>()].chunks[item[1].get<size_t>()].place = place;
      checksums.items[{place.file, place.offset}] = item[5].get<uint64_t>();
      sizes[place.file] = std::max(sizes[place.file], place.offset + place.length);
    }
    for (const auto& [file, size] : sizes) {
      const auto seen = files::storage_of(job.folder).size(files::join(job.folder, file));
      TORCH_CHECK(seen && *seen == size, "rank ", exchange.ranks()[rank], " on host ",
                  json[0].get<std::string>(), " wrote ", file, " (", size, " bytes), but rank ",
                  exchange.ranks()[0], " on host ", host_name(),
                  seen ? " sees another size" : " does not see it", ": ", job.folder,
                  " must be on a disk that all hosts share");
    }
  }
  return metadata;
}

/// For what may fail, as the next save does it again.
void quietly(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

/// Whatever an older save left and this one does not use.
void remove_stale(const std::string& folder, const Metadata& metadata) {
  std::set<std::string> used = {kMetadataFile, checksums_name(metadata.save_id)};
  for (const StoredEntry& entry : metadata.entries) {
    for (const StoredChunk& chunk : entry.chunks) used.insert(chunk.place.file);
  }
  const files::Storage& storage = files::storage_of(folder);
  for (const std::string& name : storage.list(folder)) {
    const bool ours = file_number(name) >= 0 || name.starts_with(".checksums.") ||
                      name == std::string(kMetadataFile) + ".tmp";
    if (!ours || used.count(name) > 0) continue;
    quietly([&] { storage.remove(files::join(folder, name)); });
  }
}

void commit(const SaveJob& job, Metadata metadata, Checksums checksums, const Start& start) {
  metadata.save_id = start.save_id;
  metadata.version = "1.0.0";
  const std::string bytes = encode(metadata);
  checksums.metadata = files::digest_of(bytes.data(), bytes.size());
  const files::Storage& storage = files::storage_of(job.folder);
  storage.replace(files::join(job.folder, checksums_name(start.save_id)), encode(checksums));
  storage.replace(files::join(job.folder, kMetadataFile), bytes);
  quietly([&] { remove_stale(job.folder, metadata); });
}

}  // namespace

void run(const SaveJob& job, const Exchange& exchange) {
  const Start start = prepare(job.folder, exchange);
  std::vector<std::string> reports;
  try {
    reports = exchange.all([&] { return report(write_files(job, exchange, start)); });
  } catch (const FailedEverywhere&) {
    // Only then is it sure that nobody commits. What is left otherwise, the next save removes.
    for (int64_t i = 0; i < job.threads; ++i) {
      const std::string name = data_file(exchange.rank(), start.first_file + i);
      quietly([&] { files::storage_of(job.folder).remove(files::join(job.folder, name)); });
    }
    throw;
  }
  exchange.agree([&] {
    if (exchange.rank() != 0) return;
    Checksums checksums;
    Metadata metadata = collect(job, reports, exchange, checksums);
    commit(job, std::move(metadata), std::move(checksums), start);
    if (job.on_complete) job.on_complete();
  });
}

}  // namespace fsdp2::dcp
