// `fsdp2 ckpt`: looks into checkpoints, checks and converts them.

#include "cli/ckpt_convert.h"
#include "cli/commands.h"
#include "train/progress.h"

#include <fsdp2/dcp.h>
#include <fsdp2/dcp_checkpoints.h>

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <unistd.h>

namespace fsdp2::cli {
namespace {

using Json = nlohmann::ordered_json;
using dcp::StoredEntry;

std::string bytes_text(uint64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
  return text;
}

std::string kind_of(const StoredEntry& entry) {
  return entry.is_tensor ? c10::toString(entry.dtype) : "object";
}

struct CkptArguments {
  std::string folder, other, key, prefix;
  bool json = false;
  int keep = 1;
};

void print_info(const CkptArguments& arguments) {
  const dcp::Reader reader(arguments.folder);
  const dcp::Metadata& metadata = reader.metadata();
  int64_t tensors = 0, elements = 0, blocks = 0;
  uint64_t bytes = 0;
  std::set<std::string> files;
  std::map<std::string, int64_t> dtypes;
  for (const StoredEntry& entry : metadata.entries) {
    bytes += entry.stored_bytes();
    for (const auto& chunk : entry.chunks) files.insert(chunk.place.file);
    if (!entry.is_tensor) continue;
    ++tensors;
    elements += entry.numel();
    blocks += static_cast<int64_t>(entry.chunks.size());
    dtypes[kind_of(entry)] += entry.numel();
  }
  if (arguments.json) {
    std::cout << Json{{"folder", arguments.folder},
                      {"save_id", metadata.save_id},
                      {"tensors", tensors},
                      {"objects", static_cast<int64_t>(metadata.entries.size()) - tensors},
                      {"elements", elements},
                      {"blocks", blocks},
                      {"files", files.size()},
                      {"bytes", bytes},
                      {"elements_by_dtype", dtypes}}
                     .dump(1)
              << "\n";
    return;
  }
  std::printf("%s\n", arguments.folder.c_str());
  if (!metadata.save_id.empty()) std::printf("  save     %s\n", metadata.save_id.c_str());
  std::printf("  tensors  %lld, of %lld elements, in %lld blocks\n",
              static_cast<long long>(tensors), static_cast<long long>(elements),
              static_cast<long long>(blocks));
  for (const auto& [dtype, count] : dtypes) {
    std::printf("           %s: %lld\n", dtype.c_str(), static_cast<long long>(count));
  }
  std::printf("  objects  %zu\n", metadata.entries.size() - static_cast<size_t>(tensors));
  std::printf("  bytes    %s in %zu files\n", bytes_text(bytes).c_str(), files.size());
}

bool is_selected(const StoredEntry& entry, const std::string& prefix) {
  return entry.key.starts_with(prefix);
}

void print_list(const CkptArguments& arguments) {
  const dcp::Reader reader(arguments.folder);
  const dcp::Metadata& metadata = reader.metadata();
  size_t widest = 4;
  for (const StoredEntry& entry : metadata.entries) widest = std::max(widest, entry.key.size());
  Json rows = Json::array();
  if (!arguments.json) {
    std::printf("%-*s  %-14s %-20s %7s %12s\n", static_cast<int>(widest), "key", "kind", "size",
                "blocks", "bytes");
  }
  for (const StoredEntry& entry : metadata.entries) {
    if (!is_selected(entry, arguments.prefix)) continue;
    if (arguments.json) {
      rows.push_back({{"key", entry.key},
                      {"kind", kind_of(entry)},
                      {"size", entry.sizes},
                      {"blocks", entry.chunks.size()},
                      {"bytes", entry.stored_bytes()}});
      continue;
    }
    const std::string size = entry.is_tensor ? c10::str(c10::IntArrayRef(entry.sizes)) : "";
    std::printf("%-*s  %-14s %-20s %7zu %12s\n", static_cast<int>(widest), entry.key.c_str(),
                kind_of(entry).c_str(), size.c_str(), entry.chunks.size(),
                bytes_text(entry.stored_bytes()).c_str());
  }
  if (arguments.json) std::cout << rows.dump(1) << "\n";
}

/// A bar on a terminal's stderr: share, rate and the time that is left.
class Bar {
 public:
  void show(uint64_t done, uint64_t all) {
    if (!terminal_ || all == 0) return;
    const double share = static_cast<double>(done) / static_cast<double>(all);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    if (share < 1 && seconds - shown_ < 0.1) return;
    shown_ = seconds;
    const std::string filled(static_cast<size_t>(share * 30), '#');
    const double rate = seconds > 0 ? static_cast<double>(done) / seconds : 0;
    const double left = rate > 0 ? static_cast<double>(all - done) / rate : 0;
    std::fprintf(stderr, "\r[%-30s] %3.0f%%  %s/s  %s left ", filled.c_str(), 100 * share,
                 bytes_text(static_cast<uint64_t>(rate)).c_str(), train::clock_text(left).c_str());
    if (done >= all) std::fprintf(stderr, "\r\033[K");
  }

 private:
  const bool terminal_ = isatty(STDERR_FILENO) != 0;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double shown_ = 0;
};

int verify(const CkptArguments& arguments) {
  Bar bar;
  const dcp::VerifyReport report =
      dcp::verify(arguments.folder, [&](uint64_t done, uint64_t all) { bar.show(done, all); });
  if (arguments.json) {
    std::cout << Json{{"items", report.items},
                      {"bytes", report.bytes},
                      {"checksums", report.has_checksums},
                      {"problems", report.problems}}
                     .dump(1)
              << "\n";
  } else {
    for (const std::string& problem : report.problems) std::printf("%s\n", problem.c_str());
    std::printf("%s: %lld items, %s: %s%s\n", arguments.folder.c_str(),
                static_cast<long long>(report.items), bytes_text(report.bytes).c_str(),
                report.problems.empty() ? "sound" : "DAMAGED",
                report.has_checksums ? "" : " (structure only: there are no checksums)");
  }
  return report.problems.empty() ? 0 : 1;
}

/// A line for what differs; empty if nothing does.
std::string difference(const dcp::Value& a, const dcp::Value& b) {
  if (a.kind() != b.kind()) return a.kind() + " and " + b.kind();
  if (a.is_tensor()) {
    const torch::Tensor &x = a.to_tensor(), &y = b.to_tensor();
    if (torch::equal(x, y) || x.numel() == 0) return "";
    const auto wide = x.is_complex() ? torch::kComplexDouble : torch::kDouble;
    const torch::Tensor gap = (x.to(wide) - y.to(wide)).abs();
    char text[96];
    std::snprintf(text, sizeof(text), "largest difference %.3g, in %lld of %lld elements",
                  gap.max().item<double>(), static_cast<long long>(gap.ne(0).sum().item<int64_t>()),
                  static_cast<long long>(x.numel()));
    return text;
  }
  const std::string left = dcp::to_text(a), right = dcp::to_text(b);
  return left == right ? "" : left + " and " + right;
}

int diff(const CkptArguments& arguments) {
  const dcp::Reader a(arguments.folder), b(arguments.other);
  Json rows = Json::array();
  for (const StoredEntry& entry : a.metadata().entries) {
    if (!is_selected(entry, arguments.prefix)) continue;
    if (b.metadata().find(entry.key) == nullptr) {
      rows.push_back({{"key", entry.key}, {"difference", "only in " + arguments.folder}});
      continue;
    }
    const std::string what = difference(a.load_one(entry.key), b.load_one(entry.key));
    if (!what.empty()) rows.push_back({{"key", entry.key}, {"difference", what}});
  }
  for (const StoredEntry& entry : b.metadata().entries) {
    if (is_selected(entry, arguments.prefix) && a.metadata().find(entry.key) == nullptr) {
      rows.push_back({{"key", entry.key}, {"difference", "only in " + arguments.other}});
    }
  }
  if (arguments.json) {
    std::cout << rows.dump(1) << "\n";
  } else {
    for (const Json& row : rows) {
      std::printf("%s: %s\n", row["key"].get<std::string>().c_str(),
                  row["difference"].get<std::string>().c_str());
    }
    if (rows.empty()) std::printf("no difference\n");
  }
  return rows.empty() ? 0 : 1;
}

void print_value(const CkptArguments& arguments) {
  const dcp::Value value = dcp::load_one(arguments.folder, arguments.key);
  if (value.is_tensor()) {
    std::cout << value.to_tensor() << "\n";
  } else {
    std::cout << dcp::to_text(value) << "\n";
  }
}

void prune(const CkptArguments& arguments) {
  const auto gone = dcp::Checkpoints(arguments.folder).prune(arguments.keep);
  for (const std::string& folder : gone) std::printf("removed %s\n", folder.c_str());
  std::printf("%zu removed\n", gone.size());
}

/// What is in a bucket is seen when it is asked for.
CLI::Validator or_bucket(const CLI::Validator& on_disk) {
  return {[on_disk](std::string& path) { return path.starts_with("s3://") ? "" : on_disk(path); },
          on_disk.get_description() + " or s3://BUCKET/PREFIX"};
}

void add_folder(CLI::App& command, std::string& folder,
                const char* what = "Folder of a checkpoint") {
  command.add_option("folder", folder, what)->required()->check(or_bucket(CLI::ExistingDirectory));
}

}  // namespace

void add_ckpt(CLI::App& app, int& exit_code) {
  auto* ckpt = app.add_subcommand(
      "ckpt", "Look into checkpoints (of torch.distributed.checkpoint too), check, convert them");
  ckpt->require_subcommand(1);
  const auto arguments = std::make_shared<CkptArguments>();
  const auto add = [&](const char* name, const char* what, auto&& body) {
    auto* command = ckpt->add_subcommand(name, what);
    command->callback([&exit_code, arguments, body] {
      if constexpr (std::is_void_v<decltype(body(*arguments))>) {
        body(*arguments);
      } else {
        exit_code = body(*arguments);
      }
    });
    return command;
  };
  const auto add_json = [&](CLI::App* command) {
    command->add_flag("--json", arguments->json, "Print JSON");
  };
  const auto add_prefix = [&](CLI::App* command) {
    command->add_option("--prefix", arguments->prefix, "Only keys that start with this");
  };

  auto* info = add("info", "What is in it, in sum", print_info);
  add_folder(*info, arguments->folder);
  add_json(info);

  auto* list = add("ls", "Its keys, with dtypes, sizes and bytes", print_list);
  add_folder(*list, arguments->folder);
  add_prefix(list);
  add_json(list);

  auto* check =
      add("verify", "Read all of it and compare checksums; exit code 1 if damaged", verify);
  add_folder(*check, arguments->folder);
  add_json(check);

  auto* compare = add("diff", "What differs between two; exit code 1 if anything does", diff);
  add_folder(*compare, arguments->folder);
  compare->add_option("other", arguments->other, "Folder of another checkpoint")
      ->required()
      ->check(or_bucket(CLI::ExistingDirectory));
  add_prefix(compare);
  add_json(compare);

  auto* cat = add("cat", "Print one value", print_value);
  add_folder(*cat, arguments->folder);
  cat->add_option("key", arguments->key, "As ls prints it")->required();

  auto* convert =
      add("convert", "Between a checkpoint, safetensors and a torch.save file",
          [](const CkptArguments& of) { convert_checkpoint(of.folder, of.other, of.prefix); });
  convert
      ->add_option("from", arguments->folder,
                   "Folder of a checkpoint, or a .safetensors or .pt file")
      ->required()
      ->check(or_bucket(CLI::ExistingPath));
  convert
      ->add_option("to", arguments->other,
                   "What to write: NAME.safetensors, NAME.pt, or else a checkpoint's folder")
      ->required();
  add_prefix(convert);

  auto* remove = add("prune", "Remove the older checkpoints of a run, and unfinished ones", prune);
  add_folder(*remove, arguments->folder, "Folder with step_<N> folders");
  remove->add_option("--keep", arguments->keep, "How many of the newest stay")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
}

}  // namespace fsdp2::cli
