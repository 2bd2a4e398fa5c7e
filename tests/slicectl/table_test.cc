#include "tools/slicectl/table.h"

#include <gtest/gtest.h>

namespace slice::slicectl {
namespace {

TEST(TableTest, Happy_ColumnsAreAligned) {
  Table table({"NAME", "COUNT>", "END"});
  table.Add({"a", "1", "x"});
  table.Add({"longer", "1000", ""});
  EXPECT_EQ(table.Render(),
            "NAME    COUNT  END\n"
            "a           1  x\n"
            "longer   1000\n");
}

TEST(TableTest, Edge_ASectionWithoutRowsIsNothing) {
  Table table({"NAME"});
  EXPECT_EQ(table.Section(), "");
  table.Add({"a"});
  EXPECT_EQ(table.Section(), "\nNAME\na\n");
}

TEST(TableTest, Malicious_ControlCharactersOfNamesDoNotReachTheTerminal) {
  Table table({"NAME"});
  table.Add({"\x1b[2Jgone\n\x7f"});
  EXPECT_EQ(table.Render(), "NAME\n?[2Jgone??\n");
}

TEST(TableTest, Happy_Units) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1536), "1.50 KiB");
  EXPECT_EQ(FormatBytes(int64_t{512} << 20), "512 MiB");
  EXPECT_EQ(FormatDuration(0), "-");
  EXPECT_EQ(FormatDuration(12'300'000), "12.3 ms");
  EXPECT_EQ(FormatDuration(-2'000), "-2.00 us");
}

}  // namespace
}  // namespace slice::slicectl
