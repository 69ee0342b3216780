// Checkpoints in buckets: a file is an object, a folder what keys have in common. An object is
// there once it is whole, so nothing needs renaming.

#include "checkpoint/s3_request.h"
#include "checkpoint/storage.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>

namespace fsdp2::files::s3 {
namespace {

constexpr uint64_t kPart = uint64_t{64} * 1024 * 1024;
constexpr int kMostParts = 10'000;  // the protocol's
constexpr uint64_t kBlock = uint64_t{256} * 1024;
constexpr size_t kBlocks = 4;  // that an object being read keeps

bool is_missing(const Response& response) {
  return response.status == 404 && response.code() != "NoSuchBucket";
}

/// The answer if there is such an object, however short, and if there is not; else an error.
Response get_range(const Location& at, uint64_t offset, char* to, uint64_t count) {
  const Request request{.doing = "read", .at = at, .to = to, .offset = offset, .count = count};
  Response response = send(request);
  const bool empty = response.status == 416 && offset == 0;
  if (response.status != 206 && !empty && !is_missing(response)) fail(request, response);
  return response;
}

std::optional<uint64_t> size_of(const Location& at) {
  char byte = 0;
  const Response response = get_range(at, 0, &byte, 1);
  return is_missing(response) ? std::nullopt : std::optional<uint64_t>(response.object_size);
}

/// An object being read. Headers of items are many small reads close together: what surrounds them
/// is fetched with them.
class Object final : public Readable {
 public:
  /// Null if there is none.
  static std::unique_ptr<Object> open(const std::string& path) {
    std::string block(kBlock, '\0');
    const Response response = get_range(location_of(path), 0, block.data(), block.size());
    if (is_missing(response)) return nullptr;
    auto object = std::unique_ptr<Object>(new Object(path, response.object_size));
    block.resize(response.received);
    object->blocks_.emplace_back(0, std::move(block));
    return object;
  }

  const std::string& path() const override { return path_; }
  uint64_t size() const override { return size_; }
  void read(uint64_t offset, void* to, uint64_t count) const override {
    TORCH_CHECK(offset <= size_ && count <= size_ - offset, path_,
                " is cut short: it ends at byte ", size_, ", ", count, " bytes at ", offset,
                " are wanted");
    char* at = static_cast<char*>(to);
    if (count > kBlock / 2) return fetch(offset, at, count);
    const std::lock_guard lock(mutex_);
    while (count > 0) {
      const uint64_t start = offset / kBlock * kBlock, skip = offset - start;
      const uint64_t here = std::min(count, kBlock - skip);
      std::memcpy(at, block_at(start).data() + skip, here);
      at += here, offset += here, count -= here;
    }
  }

 private:
  Object(std::string path, uint64_t size) : path_(std::move(path)), size_(size) {}

  void fetch(uint64_t offset, char* to, uint64_t count) const {
    const Response response = get_range(location_of(path_), offset, to, count);
    TORCH_CHECK(response.received == count && response.object_size == size_, path_,
                " is gone or has changed while it was read");
  }
  const std::string& block_at(uint64_t start) const {
    for (const auto& [at, bytes] : blocks_) {
      if (at == start) return bytes;
    }
    std::string bytes(std::min(kBlock, size_ - start), '\0');
    fetch(start, bytes.data(), bytes.size());
    if (blocks_.size() == kBlocks) blocks_.pop_front();
    return blocks_.emplace_back(start, std::move(bytes)).second;
  }

  const std::string path_;
  const uint64_t size_;
  mutable std::mutex mutex_;
  mutable std::deque<std::pair<uint64_t, std::string>> blocks_;
};

Response put(const Location& at, std::string_view bytes,
             const std::map<std::string, std::string>& query = {}) {
  return send_and_check(
      {.doing = "write", .method = "PUT", .at = at, .query = query, .body = bytes});
}

void abort_upload(const Location& at, const std::string& id) {
  const Request request{
      .doing = "abort the upload of", .method = "DELETE", .at = at, .query = {{"uploadId", id}}};
  const Response response = send(request);
  if (!response.ok() && response.status != 404) fail(request, response);
}

/// An object being written, in parts if it is large; there once sync() has put them together.
class NewObject final : public Writable {
 public:
  explicit NewObject(const std::string& path) : at_(location_of(path)) {}
  ~NewObject() override {
    if (upload_.empty()) return;
    try {
      abort_upload(at_, upload_);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the next save does it
    }
  }

  uint64_t size() const override { return size_; }
  void write(const void* data, uint64_t count) override {
    size_ += count;
    const char* from = static_cast<const char*>(data);
    while (count > 0) {
      if (pending_.empty() && count >= kPart) {
        send_part({from, kPart});
        from += kPart, count -= kPart;
        continue;
      }
      pending_.reserve(kPart);
      const uint64_t here = std::min(count, kPart - pending_.size());
      pending_.append(from, here);
      from += here, count -= here;
      if (pending_.size() == kPart) {
        send_part(pending_);
        pending_.clear();
      }
    }
  }
  void sync() override {
    if (upload_.empty()) {
      put(at_, pending_);
    } else {
      if (!pending_.empty()) send_part(pending_);
      complete();
    }
    pending_ = std::string();
  }

 private:
  void send_part(std::string_view bytes) {
    if (upload_.empty()) start();
    TORCH_CHECK(etags_.size() < kMostParts, "s3://", at_.bucket, "/", at_.key, " has more than ",
                kMostParts, " parts of 64 MiB: save with more threads, which write a file each");
    const Response response =
        put(at_, bytes, {{"partNumber", std::to_string(etags_.size() + 1)}, {"uploadId", upload_}});
    etags_.push_back(response.etag);
  }
  void start() {
    const Request request{
        .doing = "write", .method = "POST", .at = at_, .query = {{"uploads", ""}}};
    const Response response = send_and_check(request);
    upload_ = text_of(response.body, "UploadId");
    if (upload_.empty()) fail(request, response);
  }
  void complete() {
    std::string parts = "<CompleteMultipartUpload>";
    for (size_t i = 0; i < etags_.size(); ++i) {
      parts +=
          c10::str("<Part><PartNumber>", i + 1, "</PartNumber><ETag>", etags_[i], "</ETag></Part>");
    }
    parts += "</CompleteMultipartUpload>";
    const Request request{.doing = "write",
                          .method = "POST",
                          .at = at_,
                          .query = {{"uploadId", upload_}},
                          .body = parts};
    const Response response = send(request);
    // A first try may have done it, though its answer was lost.
    const bool done = response.ok() || (response.code() == "NoSuchUpload" && size_of(at_) == size_);
    if (!done) fail(request, response);
    upload_.clear();
  }

  const Location at_;
  uint64_t size_ = 0;
  std::string pending_, upload_;
  std::vector<std::string> etags_;
};

/// Calls `page` with each answer to a question whose answers come in pages.
template <class Page>
void for_each_page(Request request, bool may_be_refused,
                   const std::map<std::string, std::string>& continuations, const Page& page) {
  while (true) {
    const Response response = send(request);
    if (!response.ok()) {
      const bool refused = response.status == 403 || response.status == 405;
      if (refused && may_be_refused) return;
      fail(request, response);
    }
    page(response.body);
    if (text_of(response.body, "IsTruncated") != "true") return;
    for (const auto& [parameter, element] : continuations) {
      request.query[parameter] = text_of(response.body, element);
    }
  }
}

/// With `delimiter` only what lies directly below the prefix: keys and common prefixes.
std::vector<std::string> keys_below(const Location& folder, const char* delimiter) {
  Request request{.doing = "list",
                  .at = {folder.bucket, {}},
                  .query = {{"list-type", "2"}, {"prefix", folder.prefix()}}};
  if (*delimiter != '\0') request.query["delimiter"] = delimiter;
  std::vector<std::string> keys;
  for_each_page(request, false, {{"continuation-token", "NextContinuationToken"}},
                [&](const std::string& body) {
                  for (const auto object : elements(body, "Contents")) {
                    keys.push_back(text_of(object, "Key"));
                  }
                  for (const auto below : elements(body, "CommonPrefixes")) {
                    keys.push_back(text_of(below, "Prefix"));
                  }
                });
  return keys;
}

/// Uploads that have been begun and not ended, by writers that are at work or were killed. Whoever
/// is not allowed to see them sees none.
std::vector<std::pair<Location, std::string>> uploads_below(const std::string& bucket,
                                                            const std::string& prefix) {
  Request request{.doing = "list the uploads to",
                  .at = {bucket, {}},
                  .query = {{"prefix", prefix}, {"uploads", ""}}};
  std::vector<std::pair<Location, std::string>> uploads;
  for_each_page(request, true,
                {{"key-marker", "NextKeyMarker"}, {"upload-id-marker", "NextUploadIdMarker"}},
                [&](const std::string& body) {
                  for (const auto upload : elements(body, "Upload")) {
                    uploads.emplace_back(Location{bucket, text_of(upload, "Key")},
                                         text_of(upload, "UploadId"));
                  }
                });
  return uploads;
}

void remove_object(const Location& at) {
  const Request request{.doing = "remove", .method = "DELETE", .at = at};
  const Response response = send(request);
  if (!response.ok() && !is_missing(response)) fail(request, response);
}

class Buckets final : public Storage {
 public:
  std::unique_ptr<Readable> open(const std::string& path) const override {
    return Object::open(path);
  }
  std::unique_ptr<Writable> create(const std::string& path) const override {
    return std::make_unique<NewObject>(path);
  }
  void replace(const std::string& path, const std::string& bytes) const override {
    put(location_of(path), bytes);
  }
  std::optional<uint64_t> size(const std::string& path) const override {
    return size_of(location_of(path));
  }
  void remove(const std::string& path) const override {
    const Location at = location_of(path);
    remove_object(at);
    for (const auto& [place, id] : uploads_below(at.bucket, at.key)) {
      if (place.key == at.key) abort_upload(place, id);
    }
  }

  std::vector<std::string> list(const std::string& folder) const override {
    const Location at = location_of(folder);
    const size_t prefix = at.prefix().size();
    std::set<std::string> names;
    const auto add = [&](const std::string& key) {
      const size_t end = key.find('/', prefix);
      if (key.size() > prefix && end != prefix) names.insert(key.substr(prefix, end - prefix));
    };
    for (const std::string& key : keys_below(at, "/")) add(key);
    for (const auto& [place, id] : uploads_below(at.bucket, at.prefix())) add(place.key);
    return {names.begin(), names.end()};
  }
  void make_folder(const std::string& folder) const override {
    location_of(folder);
    check_settings();
  }
  void remove_folder(const std::string& folder) const override {
    const Location at = location_of(folder);
    TORCH_CHECK_VALUE(!at.key.empty(), folder, " is a whole bucket: it is not removed");
    for (const std::string& key : keys_below(at, "")) remove_object({at.bucket, key});
    for (const auto& [place, id] : uploads_below(at.bucket, at.prefix())) abort_upload(place, id);
  }
  void sync_folder(const std::string&) const override {}

  /// An object that holds the name.
  void link(const std::string& path, const std::string& name) const override {
    replace(path, name);
  }
  std::string link_target(const std::string& path) const override {
    constexpr uint64_t longest = 255;
    const auto object = Object::open(path);
    if (!object || object->size() > longest) return {};
    std::string name(object->size(), '\0');
    object->read(0, name.data(), name.size());
    return name.find('/') == std::string::npos ? name : std::string();
  }
  std::string follow(const std::string& folder) const override {
    const Location at = location_of(folder);
    const std::string name = at.key.empty() ? std::string() : link_target(folder);
    if (name.empty()) return folder;
    const size_t slash = at.key.rfind('/');
    const std::string above = slash == std::string::npos ? "" : at.key.substr(0, slash + 1);
    return c10::str("s3://", at.bucket, "/", above, name);
  }
};

}  // namespace
}  // namespace fsdp2::files::s3

namespace fsdp2::files {

const Storage& s3_storage() {
  static const s3::Buckets buckets;
  return buckets;
}

}  // namespace fsdp2::files
