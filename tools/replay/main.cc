// slice-replay: what recorded measurements say about the scheduler, without a device.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tools/replay/csv.h"
#include "tools/replay/estimators.h"

namespace {

using slice::Status;
using slice::StatusCode;
namespace replay = slice::replay;

constexpr int kUsage = 2;  // exit status of a command line that is wrong; other errors: 1

Status WriteText(const std::string& path, const std::string& text) {
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr)
    return slice::ErrnoError(StatusCode::kInvalid, errno, "cannot write '%s'", path.c_str());
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !written)
    return slice::ErrnoError(StatusCode::kInvalid, errno, "cannot write '%s'", path.c_str());
  return Status::Ok();
}

Status RunEstimators(const std::vector<std::string>& files, const std::string& json_path,
                     const replay::EvaluationOptions& options) {
  replay::Profile profile;
  for (const std::string& file : files) {
    SLICE_ASSIGN_OR_RETURN(const replay::Csv csv, replay::ReadCsv(file));
    SLICE_RETURN_IF_ERROR(replay::AddProfile(csv, &profile));
  }
  SLICE_ASSIGN_OR_RETURN(const replay::Evaluation evaluation, replay::Evaluate(profile, options));
  if (std::fputs(replay::TextOf(evaluation).c_str(), stdout) == EOF || std::fflush(stdout) != 0)
    return slice::ErrnoError(StatusCode::kInvalid, errno, "cannot write the table");
  if (json_path.empty()) return Status::Ok();
  return WriteText(json_path, replay::FiguresJson(evaluation));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Evaluates the scheduler's parts on recorded measurements", "slice-replay"};
  app.require_subcommand(1);
  std::vector<std::string> files;
  std::string json_path;
  replay::EvaluationOptions options;
  // Not CLI::PositiveNumber, which lets NaN and infinity pass.
  const CLI::Validator rate(
      [](const std::string& text) -> std::string {
        const double value = std::strtod(text.c_str(), nullptr);
        return std::isfinite(value) && value > 0 ? "" : text + " is not a positive number";
      },
      "");
  const CLI::Validator whole(
      [](const std::string& text) -> std::string {
        return text.find_first_not_of("0123456789") == std::string::npos
                   ? ""
                   : text + " is not a whole number, 0 or more";
      },
      "");
  CLI::App* const estimators = app.add_subcommand(
      "estimators", "Errors of the duration estimators on profiles of operators or transfers");
  estimators->footer(
      "A profile has a row for each shape, with the columns time_stats.OPERATOR.min, .max, .mean "
      "and\n"
      ".std in ms, and num_tokens and the model's widths; or time_stats.send_recv.*, size in "
      "bytes,\n"
      "num_workers and devices_per_node. Figures are mean absolute relative errors in percent.");
  estimators->add_option("--profile", files, "CSV file (may be repeated)")
      ->required()
      ->type_name("FILE");
  estimators->add_option("--json", json_path, "Write the figures there too")->type_name("FILE");
  estimators->add_option("--seed", options.seed, "Of folds, draws and order")
      ->capture_default_str()
      ->type_name("NUMBER")
      ->check(whole);
  estimators->add_option("--folds", options.folds, "Parts, each held out once; at least 2")
      ->capture_default_str()
      ->type_name("NUMBER")
      ->check(CLI::Range(2, 1000).description(""));
  estimators
      ->add_option("--flops-per-second", options.flops_per_second, "Of the profiled device, FLOP/s")
      ->capture_default_str()
      ->type_name("NUMBER")
      ->check(rate);
  estimators
      ->add_option("--bytes-per-second", options.bytes_per_second,
                   "Of the profiled device's memory, bytes/s")
      ->capture_default_str()
      ->type_name("NUMBER")
      ->check(rate);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  }
  const Status status = RunEstimators(files, json_path, options);
  if (!status.ok()) {
    std::fprintf(stderr, "slice-replay: %s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}
