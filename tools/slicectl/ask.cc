#include "tools/slicectl/ask.h"

#include <cmath>
#include <cstdio>
#include <vector>

#include "common/clock.h"
#include "libclient/control_channel.h"
#include "tools/slicectl/table.h"

namespace slice::slicectl {

using nlohmann::json;

namespace {

// A daemon that does not answer can still be looked at.
Status WithAdvice(const Status& status) {
  if (status.code() != StatusCode::kTimeout) return status;
  return {status.code(), status.text() +
                             "; `slicectl graphs` and `slicectl explain` read its shared memory "
                             "without it; --timeout SECONDS waits longer"};
}

}  // namespace

Result<proto::Reply> Ask(const Context& context, proto::Request request, std::span<const int> fds,
                         DurationNs timeout) {
  if (context.timeout != 0) timeout = context.timeout;
  const TimeNs deadline = MonotonicNow() + timeout;
  const auto channel = client::ControlChannel::Connect(context.socket_path, timeout);
  if (!channel.ok()) return WithAdvice(channel.status());
  std::vector<Fd> reply_fds;
  Result<proto::Reply> answer =
      (*channel)->Call(std::move(request), fds, &reply_fds, deadline - MonotonicNow());
  if (!answer.ok()) return WithAdvice(answer.status());
  proto::Reply reply = std::move(*answer);
  if (reply_fds.size() == 1 && reply.has_body()) {
    // A text too long for a message comes as a memfd of exactly that text.
    SLICE_ASSIGN_OR_RETURN(const size_t bytes, CheckForeignMemfd(reply_fds[0], 1));
    SLICE_ASSIGN_OR_RETURN(const Mapping text, Mapping::Map(reply_fds[0], bytes, false));
    reply.mutable_body()->set_text(reinterpret_cast<const char*>(text.data()), bytes);
  }
  return reply;
}

Result<json> AskJson(const Context& context, proto::Request request) {
  SLICE_ASSIGN_OR_RETURN(const proto::Reply reply, Ask(context, std::move(request)));
  json parsed = json::parse(reply.body().text(), nullptr, false);
  if (!parsed.is_object())
    return Error(StatusCode::kProtocol, "sliced answered with something that is no JSON object");
  return parsed;
}

Result<json> AskStatus(const Context& context, What what) {
  proto::Request request;
  request.mutable_status()->set_what(static_cast<uint32_t>(what));
  return AskJson(context, std::move(request));
}

std::string Text(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return "-";
  if (found->is_string()) return found->get<std::string>();
  if (found->is_boolean()) return found->get<bool>() ? "yes" : "no";
  if (found->is_number_float()) {
    const double number = found->get<double>();
    char text[48];
    std::snprintf(text, sizeof text,
                  std::abs(number) >= 1e3 && std::abs(number) < 1e15 ? "%.0f" : "%.3g", number);
    return text;
  }
  return found->dump();
}
int64_t Number(const json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || !found->is_number() ? 0 : found->get<int64_t>();
}
std::string Bytes(const json& object, const char* key) { return FormatBytes(Number(object, key)); }
std::string Duration(const json& object, const char* key) {
  return FormatDuration(Number(object, key));
}
std::string Percent(const json& object, const char* key) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100 * object.value(key, 0.0));
  return text;
}
std::string Pretty(const json& object) {
  return object.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace slice::slicectl
