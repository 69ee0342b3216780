#pragma once

// The texts of S3's protocol: what its XML says, and URLs. No more of XML than S3 answers need.

#include <string>
#include <string_view>
#include <vector>

namespace fsdp2::files::s3 {

/// What stands between <name> and </name>, each time; as it is written there.
std::vector<std::string_view> elements(std::string_view xml, const std::string& name);
/// The text of the first one; empty if there is none.
std::string text_of(std::string_view xml, const std::string& name);

/// Percent-encoded as signatures want it: all but letters, digits and "-._~".
std::string percent_encoded(std::string_view text, bool keep_slashes);

/// "s3://bucket/key"
struct Location {
  std::string bucket, key;  // the key without slashes at its end; may be empty

  /// Of this and whatever is below it.
  std::string prefix() const { return key.empty() ? key : key + "/"; }
};
/// Error if that is not what it is.
Location location_of(const std::string& path);

}  // namespace fsdp2::files::s3
