#include "tools/replay/csv.h"

#include <gtest/gtest.h>

#include "tools/replay/profile.h"

namespace slice::replay {
namespace {

void ExpectMentions(const Status& status, const std::vector<std::string>& words) {
  EXPECT_EQ(status.code(), StatusCode::kInvalid);
  for (const std::string& word : words)
    EXPECT_NE(status.text().find(word), std::string::npos) << word << " in: " << status.text();
}

TEST(Csv, Happy_CellsByRowAndColumn) {
  const Result<Csv> csv = Csv::Parse("f.csv", "a,b\r\n1,2.5\r\n\n-3,x\n");
  ASSERT_TRUE(csv.ok()) << csv.status().ToString();
  EXPECT_EQ(csv->rows(), 2u);
  EXPECT_EQ(csv->Column("b").value(), 1u);
  EXPECT_EQ(csv->Number(0, 1, 0, 10).value(), 2.5);
  EXPECT_EQ(csv->Text(1, 1), "x");
}

TEST(Csv, Edge_ErrorsNameLineAndColumn) {
  ExpectMentions(Csv::Parse("f.csv", "").status(), {"f.csv", "no rows"});
  ExpectMentions(Csv::Parse("f.csv", "a,b\n").status(), {"f.csv", "no rows"});
  ExpectMentions(Csv::Parse("f.csv", "a,b\n1,2\n\n1\n").status(), {"f.csv line 4", "1 cells", "2"});
  const Csv csv = Csv::Parse("f.csv", "a,b\n1,2\n3,x\n,nan\n1e999,7\n").value();
  ExpectMentions(csv.Column("c").status(), {"f.csv", "'c'"});
  ExpectMentions(csv.Number(1, 1, 0, 9).status(), {"line 3", "'b'", "'x'"});
  ExpectMentions(csv.Number(2, 0, 0, 9).status(), {"line 4", "'a'", "''"});
  ExpectMentions(csv.Number(2, 1, 0, 9).status(), {"line 4", "'b'", "nan"});
  ExpectMentions(csv.Number(3, 0, 0, 9).status(), {"line 5", "'a'"});
  ExpectMentions(csv.Number(0, 1, 3, 9).status(), {"line 2", "'b'", "3 to 9"});
  ExpectMentions(ReadCsv("/nonexistent.csv").status(), {"/nonexistent.csv"});
}

TEST(Csv, Edge_AByteOrderMarkIsNotPartOfTheFirstName) {
  const Csv csv = Csv::Parse("f.csv", "\xef\xbb\xbfsize,x\n1,2\n").value();
  EXPECT_EQ(csv.Column("size").value(), 0u);
}

TEST(Csv, Edge_AColumnThatIsThereTwiceIsRefused) {
  ExpectMentions(Csv::Parse("f.csv", "\na,b,a\n1,2,3\n").status(),
                 {"f.csv line 2", "'a'", "more than once", "rename"});
  EXPECT_TRUE(Csv::Parse("f.csv", ",,b\n0,1,2\n").ok());  // without names: nobody asks for them
}

TEST(Csv, Edge_WholeNumbers) {
  const Csv csv = Csv::Parse("f.csv", "a\n12\n1.5\n").value();
  EXPECT_EQ(csv.Integer(0, 0, 0, 100).value(), 12);
  ExpectMentions(csv.Integer(1, 0, 0, 100).status(), {"f.csv line 3", "'a'", "1.5", "whole"});
  ExpectMentions(csv.Integer(0, 0, 0, 9).status(), {"line 2", "0 to 9"});
}

TEST(Profile, Edge_ErrorsNameWhatIsMissing) {
  Profile profile;
  const auto add = [&](const std::string& text) {
    return AddProfile(Csv::Parse("p.csv", text).value(), &profile);
  };
  ExpectMentions(add("a,b\n1,2\n"), {"p.csv", "time_stats"});
  ExpectMentions(add("time_stats.x.mean\n1\n"), {"p.csv", "num_tokens"});
  const std::string header =
      "time_stats.x.min,time_stats.x.max,time_stats.x.mean,time_stats.x.std,num_tokens,"
      "num_tensor_parallel_workers,n_embd,n_expanded_embd,n_head,n_kv_head,use_gated_mlp\n";
  EXPECT_TRUE(add(header + "1,2,1.5,.1,8,1,64,256,4,2,True\n").ok());
  ExpectMentions(add(header + "1,2,1.5,.1,0,1,64,256,4,2,True\n"), {"line 2", "num_tokens"});
  ExpectMentions(add(header + "1,2,1.5,.1,8,1,64,256,4,9,True\n"), {"line 2", "n_kv_head"});
  ExpectMentions(add(header + "1,2,-5,.1,8,1,64,256,4,2,True\n"), {"line 2", "time_stats.x.mean"});
  ExpectMentions(add(header + "2,1,1,.1,8,1,64,256,4,2,True\n"), {"line 2", "time_stats.x.max"});
  // Mean and deviation must be possible between min and max; rounding of the last digits is.
  ExpectMentions(add(header + "1,2,2.1,.1,8,1,64,256,4,2,True\n"),
                 {"line 2", "time_stats.x.mean", "2.1", "1", "to 2"});
  ExpectMentions(add(header + "1,2,.9,.1,8,1,64,256,4,2,True\n"), {"line 2", "time_stats.x.mean"});
  ExpectMentions(add(header + "1,2,1.5,3,8,1,64,256,4,2,True\n"), {"line 2", "time_stats.x.std"});
  EXPECT_TRUE(add(header + "1,1,1.0000000002,1e-10,8,1,64,256,4,2,False\n").ok());
  ExpectMentions(add(header + "1,2,1.5,.1,8.5,1,64,256,4,2,True\n"), {"line 2", "num_tokens"});
  ExpectMentions(add(header + "1,2,1.5,.1,8,1,64,256,4,2,yes\n"),
                 {"line 2", "use_gated_mlp", "'yes'", "True or False"});
  const std::string transfers =
      "time_stats.send_recv.min,time_stats.send_recv.max,time_stats.send_recv.mean,"
      "time_stats.send_recv.std,size,num_workers\n";
  ExpectMentions(add(transfers + "1,2,1,.1,8,1\n"), {"devices_per_node"});
}

}  // namespace
}  // namespace slice::replay
