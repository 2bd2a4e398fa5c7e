#include "common/fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

namespace slice {
namespace {

TEST(Happy_Memfd, IsZeroedSizedAndCannotShrink) {
  Result<Fd> fd = CreateMemfd("test", 8192);
  ASSERT_TRUE(fd.ok()) << fd.status().ToString();
  EXPECT_EQ(CheckForeignMemfd(*fd, 8192).value(), 8192u);
  EXPECT_NE(::ftruncate(fd->get(), 4096), 0);
  EXPECT_NE(::ftruncate(fd->get(), 16384), 0);
  Result<Mapping> map = Mapping::Map(*fd, 8192, true);
  ASSERT_TRUE(map.ok());
  EXPECT_EQ(*map->as<uint64_t>(4096), 0u);
}

TEST(Malicious_Memfd, AfterFutureWriteSeal_NoNewWriterButOldMappingWrites) {
  Fd fd = CreateMemfd("test", 4096).value();
  Mapping writer = Mapping::Map(fd, 4096, true).value();
  ASSERT_TRUE(SealFutureWrite(fd).ok());
  EXPECT_FALSE(Mapping::Map(fd, 4096, true).ok());
  Mapping reader = Mapping::Map(fd, 4096, false).value();
  EXPECT_NE(::mprotect(reader.data(), 4096, PROT_READ | PROT_WRITE), 0);
  const char byte = 1;
  EXPECT_LT(::pwrite(fd.get(), &byte, 1, 0), 0);
  *writer.as<uint32_t>() = 42;
  EXPECT_EQ(*reader.as<uint32_t>(), 42u);
}

TEST(Malicious_ForeignMemfd, UnsealedSmallOrOrdinaryFiles_AreRefused) {
  Fd unsealed(::memfd_create("foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), 4096), 0);
  EXPECT_EQ(CheckForeignMemfd(unsealed, 1).status().code(), StatusCode::kInvalid);
  ASSERT_EQ(::fcntl(unsealed.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_TRUE(CheckForeignMemfd(unsealed, 4096).ok());
  EXPECT_EQ(CheckForeignMemfd(unsealed, 4097).status().code(), StatusCode::kBounds);
  Fd pipe_like(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_EQ(CheckForeignMemfd(pipe_like, 0).status().code(), StatusCode::kInvalid);
}

TEST(Edge_Mapping, ZeroBytes_IsRefused) {
  Fd fd = CreateMemfd("test", 4096).value();
  EXPECT_EQ(Mapping::Map(fd, 0, true).status().code(), StatusCode::kInvalid);
}

TEST(Happy_Fd, MoveLeavesTheSourceEmpty) {
  Fd a = CreateEventFd().value();
  const int raw = a.get();
  Fd b = std::move(a);
  EXPECT_FALSE(a.valid());  // NOLINT(bugprone-use-after-move): what is tested
  EXPECT_EQ(b.get(), raw);
}

TEST(Edge_EventFd, ManySignalsAndClears_NeverBlock) {
  Fd fd = CreateEventFd().value();
  for (int i = 0; i < 1000; ++i) SignalEventFd(fd);
  ClearEventFd(fd);
  ClearEventFd(fd);
  SUCCEED();
}

}  // namespace
}  // namespace slice
