#include "checkpoint/checksums.h"

#include "checkpoint/storage.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace fsdp2::dcp {
namespace {

using Json = nlohmann::json;
constexpr const char* kAlgorithm = "xxh3-64";

}  // namespace

std::string checksums_name(const std::string& save_id) { return ".checksums." + save_id + ".json"; }

std::string encode(const Checksums& checksums) {
  Json json = {{"algorithm", kAlgorithm}, {"metadata", checksums.metadata}};
  Json& files = json["files"] = Json::object();
  for (const auto& [place, digest] : checksums.items) {
    files[place.first].push_back({place.second, digest});
  }
  return json.dump();
}

std::optional<Checksums> read_checksums(const std::string& folder, const Metadata& metadata) {
  // The name comes from a file: it must not lead elsewhere.
  const auto plain = [](char c) {
    return std::isxdigit(static_cast<unsigned char>(c)) || c == '-';
  };
  const std::string& id = metadata.save_id;
  if (id.empty() || id.size() > 64 || !std::all_of(id.begin(), id.end(), plain)) {
    return std::nullopt;
  }
  const std::string path = files::join(folder, checksums_name(id));
  const auto bytes = files::read_if_there(path);
  if (!bytes) return std::nullopt;
  try {
    const Json json = Json::parse(*bytes);
    TORCH_CHECK(json.at("algorithm") == kAlgorithm, path, " has checksums of the unknown kind ",
                json.at("algorithm").dump());
    Checksums checksums;
    checksums.metadata = json.at("metadata").get<uint64_t>();
    for (const auto& [file, items] : json.at("files").items()) {
      for (const Json& item : items) {
        checksums.items[{file, item.at(0).get<uint64_t>()}] = item.at(1).get<uint64_t>();
      }
    }
    return checksums;
  } catch (const Json::exception& error) {
    TORCH_CHECK(false, path, " is damaged: ", error.what());
  }
}

}  // namespace fsdp2::dcp
