#include "daemon/server/timeline.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace slice::server {
namespace {

using engine::TraceEvent;
using nlohmann::json;

TraceEvent Op(TimeNs start, TimeNs finish) {
  TraceEvent event;
  event.tenant = TenantId{1};
  event.service_class = ServiceClass::kOnline;
  event.sequence = SequenceId{9};
  event.instance = InstanceId{5};
  event.op = 2;
  event.name = "layers.2";
  event.device = 1;
  event.start = start;
  event.finish = finish;
  event.predicted_start = start - 1000;
  event.predicted_finish = finish + 1000;
  return event;
}

json Find(const json& events, const std::string& name) {
  for (const json& event : events) {
    if (event["name"] == name && event["ph"] != "M") return event;
  }
  return nullptr;
}

class TimelineTest : public ::testing::Test {
 protected:
  Timeline timeline{{"cpu0", "cpu1"}, {"m0", "m1"}, 4};
};

TEST_F(TimelineTest, Happy_EventsOfEveryKindAreVisible) {
  timeline.NameTenant(TenantId{1}, "chat");
  timeline.Start(1'000'000);
  timeline.Add(Op(1'500'000, 2'000'000));
  TraceEvent transfer;
  transfer.kind = TraceEvent::Kind::kTransfer;
  transfer.source = 0;
  transfer.destination = 1;
  transfer.start = 1'600'000;
  transfer.finish = 1'700'000;
  transfer.bytes = 4096;
  timeline.Add(transfer);
  TraceEvent defer;
  defer.kind = TraceEvent::Kind::kDefer;
  defer.tenant = TenantId{1};
  defer.start = defer.finish = 1'800'000;
  defer.text = "no slice";
  timeline.Add(defer);
  timeline.Mark("phase 2", 1'900'000);
  const json parsed = json::parse(timeline.Stop(3'000'000)->ToJson());
  const json& events = parsed["traceEvents"];

  const json op = Find(events, "layers.2");
  EXPECT_EQ(op["ph"], "X");
  EXPECT_EQ(op["pid"], 1);
  EXPECT_EQ(op["tid"], 1);
  EXPECT_EQ(op["ts"], 500.0);
  EXPECT_EQ(op["dur"], 500.0);
  EXPECT_EQ(op["args"]["tenant"], "chat");
  EXPECT_EQ(op["args"]["class"], "online");
  EXPECT_EQ(op["args"]["sequence"], 9);
  EXPECT_EQ(op["args"]["instance"], 5);
  EXPECT_EQ(op["args"]["op"], 2);
  EXPECT_EQ(op["args"]["predicted_start_us"], 499.0);
  EXPECT_EQ(op["args"]["predicted_end_us"], 1001.0);
  const json copy = Find(events, "transfer");
  EXPECT_EQ(copy["pid"], 2);
  EXPECT_EQ(copy["args"]["source"], "m0");
  EXPECT_EQ(copy["args"]["destination"], "m1");
  EXPECT_EQ(Find(events, "defer: no slice")["ph"], "i");
  EXPECT_EQ(Find(events, "mark: phase 2")["s"], "g");
  EXPECT_EQ(parsed["otherData"]["events_dropped"], 0);
}

TEST_F(TimelineTest, Edge_MemoryIsBounded) {
  timeline.Start(0);
  for (int i = 0; i < 10; ++i) timeline.Add(Op(i, i + 1));
  const Result<Recording> recording = timeline.Stop(20);
  EXPECT_EQ(recording->events.size(), 4u);
  EXPECT_EQ(recording->dropped, 6u);
}

TEST_F(TimelineTest, Edge_StopWithoutStartAndEventsWhileOff) {
  timeline.Add(Op(0, 1));
  EXPECT_EQ(timeline.Stop(1).status().code(), StatusCode::kInvalid);
  timeline.Start(0);
  EXPECT_TRUE(timeline.Stop(1)->events.empty());
}

TEST_F(TimelineTest, Malicious_NamesThatAreNotText) {
  timeline.NameTenant(TenantId{1}, "\xff\xfe\"<script>");
  timeline.Start(0);
  TraceEvent event = Op(1, 2);
  const std::string name =
      "\x80"
      "quote\"backslash\\";
  event.name = name.c_str();
  timeline.Add(event);
  EXPECT_NO_THROW(
      { [[maybe_unused]] const json parsed = json::parse(timeline.Stop(5)->ToJson()); });
}

}  // namespace
}  // namespace slice::server
