#include "daemon/server/blame.h"

#include <algorithm>

namespace slice::server {

bool Blame::Death::Suspects(const engine::TenantUser& who) const {
  return std::any_of(suspects.begin(), suspects.end(), [&](const engine::TenantUser& suspect) {
    return suspect.tenant ? suspect.tenant == who.tenant : suspect.uid == who.uid;
  });
}

std::optional<engine::TenantUser> Blame::Died(const std::vector<engine::TenantUser>& suspects,
                                              TimeNs now) {
  while (!deaths_.empty() && now - deaths_.front().time > kWindow) deaths_.pop_front();
  std::erase_if(waits_, [now](const auto& item) { return now - item.second.until > kWindow; });
  if (suspects.empty()) return std::nullopt;
  deaths_.push_back({now, suspects});
  std::optional<engine::TenantUser> convicted;
  std::ptrdiff_t most = 0;
  for (const engine::TenantUser& who : suspects) {
    const auto count = std::count_if(deaths_.begin(), deaths_.end(),
                                     [&](const Death& death) { return death.Suspects(who); });
    if (count <= most || count < static_cast<std::ptrdiff_t>(deaths_max_)) continue;
    most = count;
    convicted = who;
  }
  if (!convicted.has_value()) return std::nullopt;
  std::erase_if(deaths_, [&](const Death& death) { return death.Suspects(*convicted); });
  LetWait(convicted->uid, now);
  return convicted;
}

void Blame::Ended(TenantId tenant) {
  for (Death& death : deaths_) {
    for (engine::TenantUser& suspect : death.suspects) {
      if (suspect.tenant == tenant) suspect.tenant = {};
    }
  }
}

TimeNs Blame::WaitsUntil(uid_t uid) const {
  const auto found = waits_.find(uid);
  return found == waits_.end() ? 0 : found->second.until;
}

void Blame::LetWait(uid_t uid, TimeNs now) {
  Wait& wait = waits_[uid];
  wait.length = wait.length == 0 ? kWaitMin : std::min(2 * wait.length, kWaitMax);
  wait.until = now + wait.length;
}

}  // namespace slice::server
