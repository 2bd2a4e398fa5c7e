// A question to the daemon, and the fields of its answer as text. Shared by the commands.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "common/status.h"
#include "libclient/control_channel.h"
#include "slice/proto/control.pb.h"
#include "tools/slicectl/commands.h"

namespace slice::slicectl {

// Sends one request over a connection of its own. `timeout` where the context has none. A long text
// that came by memfd is put into the reply. Errors: the daemon's, DAEMON_LOST, TIMEOUT.
Result<proto::Reply> Ask(const Context& context, proto::Request request,
                         std::span<const int> fds = {}, DurationNs timeout = client::kAdminTimeout);
// The same for answers whose text is a JSON object. Errors: PROTOCOL as well.
Result<nlohmann::json> AskJson(const Context& context, proto::Request request);

// What status requests can be about.
enum class What : uint32_t { kStatus, kDevices, kTenants, kEstimators };
Result<nlohmann::json> AskStatus(const Context& context, What what);

// A field as text; "-" (a number: 0) where there is none.
std::string Text(const nlohmann::json& object, const char* key);
int64_t Number(const nlohmann::json& object, const char* key);
std::string Bytes(const nlohmann::json& object, const char* key);
std::string Duration(const nlohmann::json& object, const char* key);
std::string Percent(const nlohmann::json& object, const char* key);  // of a share: "12.3 %"
// The whole object for --json.
std::string Pretty(const nlohmann::json& object);

}  // namespace slice::slicectl
