// Which sessions were with the executor when it died, and which one must go for it. PURE: time
// comes with each call.
//
// The suspects of a death are the sessions whose ops ran, and the one whose request was being
// taken. A session that was suspected of `deaths_max` deaths within kWindow is convicted; at most
// one per death: the one with the most deaths, of equals the likeliest. The deaths that it explains
// are forgotten then, so that whoever merely ran beside it is not counted for them. Opening another
// session is no new start: the deaths of a user's ended sessions count for each of the user's that
// is suspected, and the user of a convicted one waits before the next is let in.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "common/units.h"
#include "daemon/engine/engine.h"

namespace slice::server {

class Blame {
 public:
  static constexpr DurationNs kWindow = 600 * kSecond;  // three of the default hang limit fit
  // How long the user of a convicted session waits: doubled each time, over after a kWindow
  // without.
  static constexpr DurationNs kWaitMin = kSecond;
  static constexpr DurationNs kWaitMax = 60 * kSecond;

  explicit Blame(uint32_t deaths_max) : deaths_max_(deaths_max) {}

  // The executor died. `suspects`: each once, the likeliest first. Returns the convicted, if any.
  std::optional<engine::TenantUser> Died(const std::vector<engine::TenantUser>& suspects,
                                         TimeNs now);
  // Nothing is left of this session.
  void Ended(TenantId tenant);
  // Until when this user's sessions are not let in; 0 or past: they are.
  TimeNs WaitsUntil(uid_t uid) const;

 private:
  struct Death {
    TimeNs time = 0;
    std::vector<engine::TenantUser> suspects;  // tenant 0: one that has ended
    bool Suspects(const engine::TenantUser& who) const;
  };
  struct Wait {
    DurationNs length = 0;
    TimeNs until = 0;
  };
  void LetWait(uid_t uid, TimeNs now);

  const uint32_t deaths_max_;
  std::deque<Death> deaths_;  // of the last kWindow
  std::map<uid_t, Wait> waits_;
};

}  // namespace slice::server
