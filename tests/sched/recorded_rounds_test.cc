// What is decided in rounds of the demo must not change unnoticed. tests/sim/rounds/decisions.txt
// has one line a round; SLICE_UPDATE_GOLDENS=1 rewrites it.
#include "tests/sim/recorded_rounds.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "daemon/sched/policy.h"
#include "tests/sched/exhaustive_policy.h"

namespace slice::sched {
namespace {

std::string Text(const Decision& decision, TimeNs now) {
  std::ostringstream text;
  if (decision.placed) {
    text << "device " << int{decision.device} << ", finish " << decision.predicted_finish - now;
  } else {
    text << "deferred " << decision.retry_at - now;
  }
  text << ", " << decision.op_count << " ops of the batch\n";
  return text.str();
}

TEST(RecordedRounds, Regression_DecisionsAreThoseCheckedIn) {
  const std::vector<Round> rounds = RecordedRounds();
  ASSERT_GE(rounds.size(), 5u);
  const estimate::TransferEstimator transfers(kDevicesMax);
  sim::Simulator simulator(transfers, {});
  const auto policy = std::move(MakePolicy("slice", &simulator).value());
  std::string decided;
  for (size_t i = 0; i < rounds.size(); ++i) {
    const Round& round = rounds[i];
    const Decision decision = policy->Decide(round.snapshot, round.batch, round.home);
    decided += Text(decision, round.snapshot.now);
    EXPECT_EQ(Text(decision, 0), Text(DecideExhaustively(round.snapshot, round.batch, round.home,
                                                         simulator.options(), transfers),
                                      0))
        << "round " << i;
  }
  const std::string path = SLICE_ROUNDS_DECISIONS;
  if (std::getenv("SLICE_UPDATE_GOLDENS") != nullptr) std::ofstream(path) << decided;
  std::ifstream file(path);
  std::stringstream golden;
  golden << file.rdbuf();
  EXPECT_EQ(decided, golden.str());
}

TEST(RecordedRounds, Happy_TextIsReadBackAsItWas) {
  for (const Round& round : RecordedRounds()) {
    const std::string text = RoundText(round.snapshot, round.batch, round.home);
    const Result<std::vector<Round>> again = ParseRounds(text);
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    ASSERT_EQ(again->size(), 1u);
    EXPECT_EQ(RoundText((*again)[0].snapshot, (*again)[0].batch, (*again)[0].home), text);
  }
}

TEST(RecordedRounds, Malicious_WrongTextIsRefusedWithItsLine) {
  const char* const header = "round 1 1000 0 -\n";
  const std::string wrong[] = {
      "round 2 1000 0 -\nend\n",                // version
      "O 0 0 - 0 0 0 0 1 - 0 0 0 0 0\n",        // outside a round
      std::string(header) + "Z 1\nend\n",       // kind of line
      std::string(header) + "M x\nend\n",       // not an integer
      std::string(header) + "M 5\nB 0\nend\n",  // an op that is not there
      std::string(header) + "M 5\nI 0 0 0 - 0 0 0 0 0\nO 0 0 - 0 0 0 0 1 - 0 0 1 7 0 0\nB 0\nend\n",
      std::string(header) + header,   // a round in a round
      std::string(header) + "M 5\n",  // no end
  };
  for (const std::string& text : wrong) {
    const Result<std::vector<Round>> rounds = ParseRounds(text);
    ASSERT_FALSE(rounds.ok()) << text;
    EXPECT_EQ(rounds.status().code(), StatusCode::kInvalid);
    EXPECT_NE(rounds.status().ToString().find("line "), std::string::npos);
  }
}

}  // namespace
}  // namespace slice::sched
