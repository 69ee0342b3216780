#include "checkpoint/s3_request.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <curl/curl.h>
#include <mutex>
#include <random>
#include <thread>
#include <unistd.h>
#include <vector>

namespace fsdp2::files::s3 {
namespace {

constexpr int kAttempts = 6;  // the pauses between them are 6 s in all
constexpr std::chrono::milliseconds kFirstPause{200};
constexpr size_t kLargestAnswer = size_t{64} * 1024 * 1024;

struct Settings {
  std::string key, secret, token, region, endpoint;
};

Settings settings() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  Settings all{variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY"),
               variable("AWS_SESSION_TOKEN"), variable("AWS_REGION"), variable("AWS_ENDPOINT_URL")};
  TORCH_CHECK_VALUE(!all.key.empty() && !all.secret.empty(),
                    "s3:// needs the environment variables AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY");
  if (all.region.empty()) all.region = variable("AWS_DEFAULT_REGION");
  if (all.region.empty()) all.region = "us-east-1";
  while (all.endpoint.ends_with('/')) all.endpoint.pop_back();
  return all;
}

/// Connections that are open, to be used again.
class Handles {
 public:
  static Handles& instance() {
    static auto* handles = new Handles();  // outlives threads that end late
    return *handles;
  }
  CURL* take() {
    const std::lock_guard lock(mutex_);
    if (owner_ != getpid()) free_.clear();  // after a fork they are still the parent's
    owner_ = getpid();
    if (free_.empty()) return curl_easy_init();
    CURL* handle = free_.back();
    free_.pop_back();
    return handle;
  }
  void give(CURL* handle) {
    curl_easy_reset(handle);  // keeps the connection
    const std::lock_guard lock(mutex_);
    free_.push_back(handle);
  }

 private:
  Handles() { curl_global_init(CURL_GLOBAL_ALL); }

  std::mutex mutex_;
  std::vector<CURL*> free_;
  pid_t owner_ = getpid();
};

/// One try of a request.
class Transfer {
 public:
  Transfer(const Request& request, Response& response)
      : request_(request), response_(response), curl_(Handles::instance().take()) {
    TORCH_CHECK(curl_ != nullptr, "libcurl cannot start");
  }
  ~Transfer() {
    curl_slist_free_all(headers_);
    Handles::instance().give(curl_);
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  CURLcode run(const Settings& settings) {
    set_target(settings);
    set_method();
    set_limits();
    set(CURLOPT_WRITEFUNCTION, &Transfer::take_body);
    set(CURLOPT_WRITEDATA, this);
    set(CURLOPT_HEADERFUNCTION, &Transfer::take_header);
    set(CURLOPT_HEADERDATA, this);
    set(CURLOPT_ERRORBUFFER, error_);
    const CURLcode code = curl_easy_perform(curl_);
    curl_easy_getinfo(curl_, CURLINFO_RESPONSE_CODE, &response_.status);
    return code;
  }
  std::string error(CURLcode code) const {
    return error_[0] != '\0' ? error_ : curl_easy_strerror(code);
  }

 private:
  template <class T>
  void set(CURLoption option, T value) {
    TORCH_CHECK(curl_easy_setopt(curl_, option, value) == CURLE_OK, "this libcurl (",
                curl_version(), ") lacks option ", static_cast<int>(option), ", which s3:// needs");
  }

  void set_target(const Settings& settings) {
    const Location& at = request_.at;
    // A bucket is a part of the host's name, where certificates allow it.
    const bool in_path = !settings.endpoint.empty() || at.bucket.find('.') != std::string::npos;
    std::string url = settings.endpoint;
    if (url.empty()) {
      url = c10::str("https://", in_path ? "" : at.bucket + ".", "s3.", settings.region,
                     ".amazonaws.com");
    }
    url += "/" + (in_path ? at.bucket + "/" : "") + percent_encoded(at.key, true);
    char separator = '?';
    for (const auto& [name, value] : request_.query) {
      url += c10::str(separator, name, "=", percent_encoded(value, false));
      separator = '&';
    }
    set(CURLOPT_URL, url.c_str());
    set(CURLOPT_PATH_AS_IS, 1L);
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_AWS_SIGV4, ("aws:amz:" + settings.region + ":s3").c_str());
    set(CURLOPT_USERNAME, settings.key.c_str());
    set(CURLOPT_PASSWORD, settings.secret.c_str());
    add_header("x-amz-content-sha256: UNSIGNED-PAYLOAD");
    if (!settings.token.empty()) add_header("x-amz-security-token: " + settings.token);
  }

  void set_method() {
    const std::string_view method = request_.method;
    if (method == "PUT") {
      set(CURLOPT_UPLOAD, 1L);
      set(CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(request_.body.size()));
      set(CURLOPT_READFUNCTION, &Transfer::give_body);
      set(CURLOPT_READDATA, this);
      set(CURLOPT_SEEKFUNCTION, &Transfer::seek_body);
      set(CURLOPT_SEEKDATA, this);
    } else if (method == "POST") {
      set(CURLOPT_POSTFIELDS, request_.body.data() == nullptr ? "" : request_.body.data());
      set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request_.body.size()));
    } else if (method == "DELETE") {
      set(CURLOPT_CUSTOMREQUEST, "DELETE");
    } else if (request_.to != nullptr) {
      const uint64_t first = request_.offset + response_.received;  // goes on where it was cut off
      set(CURLOPT_RANGE, c10::str(first, "-", request_.offset + request_.count - 1).c_str());
    }
    if (method == "PUT" || method == "POST") {
      add_header("Content-Type: application/octet-stream");
      // To leave out the header Expect breaks signatures: 7.88 signs it although it is not sent.
      set(CURLOPT_EXPECT_100_TIMEOUT_MS, 250L);
    }
    set(CURLOPT_HTTPHEADER, headers_);
  }

  void set_limits() {
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
    set(CURLOPT_CONNECTTIMEOUT, 10L);
    set(CURLOPT_LOW_SPEED_LIMIT, 1L);  // bytes a second, for so many seconds:
    set(CURLOPT_LOW_SPEED_TIME, 60L);
    set(CURLOPT_BUFFERSIZE, 512L * 1024);
    set(CURLOPT_UPLOAD_BUFFERSIZE, 512L * 1024);
  }

  void add_header(const std::string& line) { headers_ = curl_slist_append(headers_, line.c_str()); }

  static size_t take_body(char* data, size_t, size_t count, void* self) {
    return static_cast<Transfer*>(self)->take(data, count);
  }
  size_t take(const char* data, size_t count) {
    long status = 0;
    curl_easy_getinfo(curl_, CURLINFO_RESPONSE_CODE, &status);
    if (request_.to != nullptr && status == 206) {
      if (count > request_.count - response_.received) return 0;  // more than was asked for
      std::memcpy(request_.to + response_.received, data, count);
      response_.received += count;
      return count;
    }
    if (response_.body.size() + count > kLargestAnswer) return 0;
    response_.body.append(data, count);
    return count;
  }

  static size_t give_body(char* data, size_t, size_t count, void* self) {
    auto* transfer = static_cast<Transfer*>(self);
    const std::string_view left = transfer->request_.body.substr(transfer->sent_);
    count = std::min(count, left.size());
    if (count > 0) std::memcpy(data, left.data(), count);
    transfer->sent_ += count;
    return count;
  }
  static int seek_body(void* self, curl_off_t offset, int) {
    static_cast<Transfer*>(self)->sent_ = static_cast<size_t>(offset);
    return CURL_SEEKFUNC_OK;
  }

  static size_t take_header(char* data, size_t, size_t count, void* self) {
    std::string line(data, count);
    const size_t colon = line.find(':');
    if (colon == std::string::npos) return count;
    std::string name = line.substr(0, colon), value = line.substr(colon + 1);
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    value.erase(0, value.find_first_not_of(" \t"));
    value.erase(value.find_last_not_of(" \t\r\n") + 1);
    Response& response = static_cast<Transfer*>(self)->response_;
    if (name == "etag") response.etag = value;
    if (name == "content-range") {  // "bytes 0-9/100"
      response.object_size = std::strtoull(value.c_str() + value.find('/') + 1, nullptr, 10);
    }
    return count;
  }

  const Request& request_;
  Response& response_;
  CURL* curl_;
  curl_slist* headers_ = nullptr;
  size_t sent_ = 0;
  char error_[CURL_ERROR_SIZE] = {};
};

bool may_pass(CURLcode code) {
  return code != CURLE_URL_MALFORMAT && code != CURLE_UNSUPPORTED_PROTOCOL &&
         code != CURLE_PEER_FAILED_VERIFICATION && code != CURLE_WRITE_ERROR;
}
bool may_pass(const Response& response) {
  return response.status >= 500 || response.status == 429 || response.code() == "RequestTimeout";
}

/// Twice as long each time; not the same on all ranks.
void pause_after(int attempt) {
  static thread_local std::mt19937 random{std::random_device()()};
  const double share = std::uniform_real_distribution<>(0.5, 1.5)(random);
  double factor = 1;
  for (int i = 1; i < attempt; ++i) factor *= 2;
  std::this_thread::sleep_for(kFirstPause * (factor * share));
}

/// Of a range, what there is.
uint64_t wanted(const Request& request, const Response& response) {
  return std::min(request.count,
                  response.object_size - std::min(request.offset, response.object_size));
}

std::string name_of(const Location& at) { return "s3://" + at.bucket + "/" + at.key; }

}  // namespace

void check_settings() { settings(); }

Response send(const Request& request) {
  const Settings with = settings();
  Response response;
  for (int attempt = 1;; ++attempt) {
    response.status = 0;
    response.body.clear();
    Transfer transfer(request, response);
    const CURLcode code = transfer.run(with);
    if (response.received > 0 && response.received == wanted(request, response)) {
      response.status = 206;  // nothing is left to be asked for, however the connection ended
      return response;
    }
    // The end of an upload answers 200 first and may then say that it has failed after all.
    if (response.status == 200 && *request.method == 'P' && !response.code().empty()) {
      response.status = 500;
    }
    if (code == CURLE_OK && !may_pass(response)) return response;
    const bool last = attempt == kAttempts;
    if (code == CURLE_OK && last) return response;
    TORCH_CHECK(may_pass(code) && !last, "cannot ", request.doing, " ", name_of(request.at), ": ",
                transfer.error(code), with.endpoint.empty() ? "" : "; AWS_ENDPOINT_URL is ",
                with.endpoint, last ? c10::str("; tried ", attempt, " times") : "");
    pause_after(attempt);
  }
}

Response send_and_check(const Request& request) {
  Response response = send(request);
  if (!response.ok()) fail(request, response);
  return response;
}

void fail(const Request& request, const Response& response) {
  const std::string code = response.code(), message = text_of(response.body, "Message");
  TORCH_CHECK(false, "cannot ", request.doing, " ", name_of(request.at), ": HTTP ", response.status,
              code.empty() ? "" : ", " + code, message.empty() ? "" : ": " + message);
}

}  // namespace fsdp2::files::s3
