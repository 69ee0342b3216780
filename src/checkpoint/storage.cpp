#include "checkpoint/storage.h"

#include "checkpoint/file_io.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <system_error>

namespace fsdp2::files {
namespace {

namespace fs = std::filesystem;

void check(const std::error_code& error, const char* doing, const std::string& path) {
  TORCH_CHECK(!error, "cannot ", doing, " ", path, ": ", error.message());
}

class NewFile final : public Writable {
 public:
  explicit NewFile(const std::string& path) : file_(path) {}

  uint64_t size() const override { return file_.size(); }
  void write(const void* data, uint64_t count) override { file_.write(data, count); }
  void sync() override { file_.sync(); }

 private:
  WriteFile file_;
};

/// Folders of a file system.
class Folders final : public Storage {
 public:
  std::unique_ptr<Readable> open(const std::string& path) const override {
    if (!fs::exists(path)) return nullptr;
    return std::make_unique<ReadFile>(path);
  }
  std::unique_ptr<Writable> create(const std::string& path) const override {
    return std::make_unique<NewFile>(path);
  }
  void replace(const std::string& path, const std::string& bytes) const override {
    files::replace(path, bytes);
  }
  std::optional<uint64_t> size(const std::string& path) const override {
    std::error_code error;
    const auto bytes = fs::file_size(path, error);
    return error ? std::nullopt : std::optional<uint64_t>(bytes);
  }
  void remove(const std::string& path) const override {
    std::error_code error;
    fs::remove(path, error);
    check(error, "remove", path);
  }

  std::vector<std::string> list(const std::string& folder) const override {
    std::error_code error;
    fs::directory_iterator entries(folder, error);
    if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory) {
      return {};
    }
    check(error, "list", folder);
    std::vector<std::string> names;
    for (const auto& entry : entries) names.push_back(entry.path().filename().string());
    return names;
  }
  void make_folder(const std::string& folder) const override {
    std::error_code error;
    fs::create_directories(folder, error);
    check(error, "make the folder", folder);
  }
  void remove_folder(const std::string& folder) const override {
    std::error_code error;
    fs::remove_all(folder, error);
    check(error, "remove", folder);
  }
  void sync_folder(const std::string& folder) const override { files::sync_folder(folder); }

  void link(const std::string& path, const std::string& name) const override {
    const std::string temporary = path + ".tmp";
    remove(temporary);
    fs::create_directory_symlink(name, temporary);
    fs::rename(temporary, path);
    files::sync_folder(fs::path(path).parent_path().string());
  }
  std::string link_target(const std::string& path) const override {
    std::error_code error;
    const fs::path target = fs::read_symlink(path, error);
    return error ? std::string() : target.filename().string();
  }
  std::string follow(const std::string& folder) const override { return folder; }  // opening does
};

}  // namespace

const Storage& storage_of(const std::string& path) {
  static const Folders folders;
  return path.starts_with("s3://") ? s3_storage() : folders;
}

std::string join(const std::string& folder, const std::string& name) {
  return folder.empty() || folder.ends_with('/') ? folder + name : folder + "/" + name;
}

std::optional<std::string> read_if_there(const std::string& path) {
  const auto file = storage_of(path).open(path);
  if (!file) return std::nullopt;
  std::string bytes(file->size(), '\0');
  file->read(0, bytes.data(), bytes.size());
  return bytes;
}

}  // namespace fsdp2::files
