// Small helpers that every engine scenario uses.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "daemon/gmg/reader.h"
#include "tests/testing/graph_builder.h"
#include "tests/testing/virtual_executor.h"

namespace slice::testing {

// `devices` devices, each with a domain of its own (or all in one).
inline engine::Config MakeConfig(size_t devices, int64_t pool_bytes = 64 << 20,
                                 bool shared_domain = false) {
  engine::Config config;
  for (size_t d = 0; d < devices; ++d) {
    const std::string number = std::to_string(d);
    config.devices.push_back({"cpu" + number, static_cast<DomainIndex>(shared_domain ? 0 : d), 0});
    if (!shared_domain || d == 0) config.domains.push_back({"d" + number, pool_bytes, 256 << 20});
  }
  config.live_ops_max = 8192;
  config.workspace_margin_bytes = 0;
  return config;
}

// Nothing of any instance is left: pools, ledger, GMG.
inline void ExpectClean(Simulation& sim) {
  EXPECT_EQ(sim.Violations(), "");
  for (const int64_t used : sim.executor().pool_used) EXPECT_EQ(used, 0);
  EXPECT_EQ(sim.executor().instances_known(), 0u);
  const Result<gmg::Reader> reader = gmg::Reader::Open(sim.gmg_memory());
  ASSERT_TRUE(reader.ok()) << reader.status().ToString();
  for (const gmg::DomainView& domain : reader->Domains()) {
    EXPECT_EQ(domain.reserved_bytes, 0) << domain.name;
    EXPECT_EQ(domain.granted_bytes, 0) << domain.name;
    EXPECT_EQ(domain.lane_bytes, 0) << domain.name;
  }
  EXPECT_TRUE(reader->Instances().empty());
  EXPECT_TRUE(reader->Transfers().empty());
  for (const gmg::PieceView& piece : reader->Pieces()) EXPECT_EQ(piece.queue_length, 0u);
  for (const gmg::DeviceView& device : reader->Devices()) {
    EXPECT_EQ(device.placed + device.issued, 0u);
    EXPECT_EQ(device.running_instance, 0u);
  }
}

}  // namespace slice::testing
