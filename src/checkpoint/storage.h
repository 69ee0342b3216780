#pragma once

// Where checkpoints lie: in folders of a file system, or in a bucket below "s3://bucket/prefix".
// Errors name the file, or the bucket and key, and what the system or the server says.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp2::files {

/// A file to be read, in any order. Thread-safe.
class Readable {
 public:
  Readable() = default;
  virtual ~Readable() = default;
  Readable(const Readable&) = delete;
  Readable& operator=(const Readable&) = delete;

  virtual const std::string& path() const = 0;
  virtual uint64_t size() const = 0;
  /// Error if the file ends before.
  virtual void read(uint64_t offset, void* to, uint64_t count) const = 0;
};

/// A new file, written front to back. It is there and whole after sync(). Of one without, a part
/// may be there, which list() and remove() know.
class Writable {
 public:
  Writable() = default;
  virtual ~Writable() = default;
  Writable(const Writable&) = delete;
  Writable& operator=(const Writable&) = delete;

  virtual uint64_t size() const = 0;
  virtual void write(const void* data, uint64_t count) = 0;
  /// Makes all of it durable, and closes it.
  virtual void sync() = 0;
};

class Storage {
 public:
  Storage() = default;
  virtual ~Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  /// Null if there is no such file.
  virtual std::unique_ptr<Readable> open(const std::string& path) const = 0;
  virtual std::unique_ptr<Writable> create(const std::string& path) const = 0;
  /// A small file: it is the old one or the new one, never a part.
  virtual void replace(const std::string& path, const std::string& bytes) const = 0;
  /// Nothing if there is no such file.
  virtual std::optional<uint64_t> size(const std::string& path) const = 0;
  /// No error if it is not there.
  virtual void remove(const std::string& path) const = 0;

  /// Names of the files and folders in it; none if there is no such folder.
  virtual std::vector<std::string> list(const std::string& folder) const = 0;
  virtual void make_folder(const std::string& folder) const = 0;
  /// With everything in it.
  virtual void remove_folder(const std::string& folder) const = 0;
  /// Names in a folder become durable.
  virtual void sync_folder(const std::string& folder) const = 0;

  /// A name that stands for another name in the same folder. Replaced at once.
  virtual void link(const std::string& path, const std::string& name) const = 0;
  /// The other name; empty if there is no such link.
  virtual std::string link_target(const std::string& path) const = 0;
  /// `folder`, or the one that a link of this name stands for.
  virtual std::string follow(const std::string& folder) const = 0;
};

/// The storage of `path`: of buckets if it starts with "s3://", an error if this build has none.
const Storage& storage_of(const std::string& path);
/// In s3_storage.cpp; an error in no_s3.cpp.
const Storage& s3_storage();

std::string join(const std::string& folder, const std::string& name);
/// Nothing if there is no such file.
std::optional<std::string> read_if_there(const std::string& path);

}  // namespace fsdp2::files
