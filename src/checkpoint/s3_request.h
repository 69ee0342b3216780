#pragma once

// One request to an S3 server, signed by libcurl (AWS Signature Version 4), sent again while that
// may help.

#include "checkpoint/s3_text.h"

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace fsdp2::files::s3 {

struct Request {
  const char* doing = "";                      // for errors: "read"
  const char* method = "GET";                  // GET, PUT, POST or DELETE
  Location at{};                               // without a key: the bucket
  std::map<std::string, std::string> query{};  // in the order that signatures want
  std::string_view body{};                     // of PUT and POST
  /// A GET of `count` bytes from `offset` into `to`. None: of everything, into the response's body.
  char* to = nullptr;
  uint64_t offset = 0, count = 0;
};

struct Response {
  long status = 0;
  std::string body, etag;
  uint64_t received = 0;     // bytes that went to `to`
  uint64_t object_size = 0;  // if a range was asked for

  bool ok() const { return status >= 200 && status < 300; }
  /// The server's name for its error, "NoSuchKey"; empty if it gives none.
  std::string code() const { return text_of(body, "Code"); }
};

/// Error if there are no credentials.
void check_settings();

/// The server's answer, whatever it says. Connections that fail, answers 5xx and 429 are tried
/// again, a few times, with growing pauses. Error if the server cannot be reached, naming it.
/// Settings come from the environment each time: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
/// AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL. Thread-safe.
Response send(const Request& request);
/// As send(); error if the answer is none.
Response send_and_check(const Request& request);
/// "cannot read s3://bucket/key: HTTP 403, AccessDenied: what the server says"
[[noreturn]] void fail(const Request& request, const Response& response);

}  // namespace fsdp2::files::s3
