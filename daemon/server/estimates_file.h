// Learned durations on disk, between runs of the daemon: JSON, by names of device kinds and memory
// domains. Read at start, written every few minutes and at stop; see docs/estimation.md.
//
// Threads: the server's. Blocks: for the file.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "common/status.h"
#include "daemon/engine/engine.h"
#include "daemon/estimate/saved.h"

namespace slice::server {

// Errors: INVALID (not JSON, not ours, another version, a number or count that cannot be). Device
// kinds and domains that this daemon does not have are left out.
Result<estimate::Saved> ParseEstimates(std::string_view text,
                                       std::span<const engine::DomainConfig> domains);
std::string FormatEstimates(const estimate::Saved& saved,
                            std::span<const engine::DomainConfig> domains);

// Never fails: a file that cannot be used is reported, moved aside as PATH.bad-N, and nothing is
// known. No file is no error.
estimate::Saved LoadEstimates(const std::string& path,
                              std::span<const engine::DomainConfig> domains);
// Replaces the file in one step. Errors: INVALID (cannot be written); the old file stays then.
Status SaveEstimates(const std::string& path, const estimate::Saved& saved,
                     std::span<const engine::DomainConfig> domains);

}  // namespace slice::server
