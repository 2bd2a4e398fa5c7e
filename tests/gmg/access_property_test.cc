// Random programs of reads, writes, moves, cancels, failures and deaths on the access queues of a
// few pieces, against a sequential model: each use must find exactly the contents that it would
// find if all programs ran one after the other in submit order, no write runs beside another use,
// and nobody is left waiting.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <vector>

#include "daemon/gmg/access_queue.h"

namespace slice::gmg {
namespace {

using Kind = AccessEntry::Kind;
constexpr uint32_t kPieces = 4;

struct Piece {
  AccessQueue queue;
  uint64_t contents = 0;  // the program that wrote them
  uint64_t promised = 0;  // contents when everything queued is done: what a new program will find
  uint32_t reading = 0, writing = 0;
};

// What a program does to one piece, in one or several uses.
struct Access {
  uint32_t piece = 0;
  bool write = false;
  uint32_t uses = 1, begun = 0, done = 0;
  uint64_t expected = 0;  // contents that it must find, by the sequential model
  bool gone() const { return done == uses; }
};

// An instance or a command: one entry in the queue of each piece that it touches.
struct Program {
  uint64_t number = 0;  // in submit order
  uint32_t slot = 0;
  Kind kind = Kind::kInstance;
  std::vector<Access> accesses;
  bool Wrote() const {
    return std::any_of(accesses.begin(), accesses.end(),
                       [](const Access& a) { return a.write && a.begun > 0; });
  }
};

class World {
 public:
  explicit World(uint64_t seed) : random_(seed) {}

  void Run() {
    for (int step = 0; step < 500 && !::testing::Test::HasFailure(); ++step) {
      const uint64_t what = Pick(100);
      if (what < 20) Submit();
      if (what >= 20 && what < 25) Move();
      if (what >= 25 && what < 27 && !programs_.empty())
        Fail(programs_[Pick(programs_.size())].number);
      if (what == 27) Die();
      if (what > 27) Progress();
      CheckOrder();
    }
    while (DrainOnce()) {
    }
    EXPECT_TRUE(programs_.empty()) << programs_.size() << " programs wait for ever";
    while (!moves_.empty()) EndMove(moves_.begin());
    for (const Piece& piece : pieces_) EXPECT_TRUE(piece.queue.empty());
  }
  uint64_t uses() const { return uses_; }

 private:
  uint64_t Pick(uint64_t below) { return random_() % below; }
  Program* Find(uint64_t number) {
    const auto found = std::find_if(programs_.begin(), programs_.end(),
                                    [number](const Program& p) { return p.number == number; });
    return found == programs_.end() ? nullptr : &*found;
  }

  void Submit() {
    Program program;
    program.number = ++submitted_;
    program.kind = Pick(4) == 0 ? Kind::kCommand : Kind::kInstance;
    program.slot = next_slot_++;
    for (uint32_t p = 0; p < kPieces; ++p) {
      if (Pick(2) == 0) continue;
      Access access;
      access.piece = p;
      access.write = Pick(2) == 0;
      access.uses = program.kind == Kind::kCommand ? 1 : 1 + static_cast<uint32_t>(Pick(3));
      access.expected = pieces_[p].promised;
      AccessEntry entry;
      entry.kind = program.kind;
      entry.owner = program.slot;
      entry.write = access.write;
      entry.uses_left = static_cast<uint16_t>(access.uses);
      pieces_[p].queue.Append(entry);
      if (access.write) pieces_[p].promised = program.number;
      program.accesses.push_back(access);
    }
    if (!program.accesses.empty()) programs_.push_back(program);
  }

  void Progress() {
    if (!moves_.empty() && Pick(4) == 0) return EndMove(moves_.begin());
    if (programs_.empty()) return;
    Program& program = programs_[Pick(programs_.size())];
    Use(program, program.accesses[Pick(program.accesses.size())]);
  }

  // Whether anything could go on: every move, and one use of every program.
  bool DrainOnce() {
    bool progress = !moves_.empty();
    while (!moves_.empty()) EndMove(moves_.begin());
    for (size_t i = programs_.size(); i-- > 0;) {
      Program& program = programs_[i];
      for (Access& access : program.accesses) {
        if (!Use(program, access)) continue;
        progress = true;
        break;  // the program may be gone
      }
    }
    return progress;
  }

  // A use ends, or begins if the queue lets it.
  bool Use(Program& program, Access& access) {
    Piece& piece = pieces_[access.piece];
    if (access.begun > access.done) {
      --(access.write ? piece.writing : piece.reading);
      ++access.done;
      if (access.write) piece.contents = program.number;
      piece.queue.UseDone(program.kind, program.slot);
      const bool over = std::all_of(program.accesses.begin(), program.accesses.end(),
                                    [](const Access& a) { return a.gone(); });
      if (over) Forget(program.number);
      return true;
    }
    const bool may = access.write ? piece.queue.MayWrite(program.kind, program.slot)
                                  : piece.queue.MayRead(program.kind, program.slot);
    if (!may || access.gone()) return false;
    if (access.done == 0 || !access.write) {
      EXPECT_EQ(piece.contents, access.expected);
    }
    EXPECT_EQ(piece.writing, 0u) << "beside a write";
    if (access.write) {
      EXPECT_EQ(piece.reading, 0u) << "a write beside reads";
    }
    ++(access.write ? piece.writing : piece.reading);
    ++access.begun;
    ++uses_;
    return true;
  }

  // The engine enters a move before the instance that asks for it, when that one is first and does
  // not use the piece yet.
  void Move() {
    for (const Program& program : programs_) {
      for (const Access& access : program.accesses) {
        Piece& piece = pieces_[access.piece];
        const bool idle = piece.reading == 0 && piece.writing == 0;
        if (program.kind != Kind::kInstance || !idle || moves_.contains(access.piece) ||
            !piece.queue.IsFirst(Kind::kInstance, program.slot))
          continue;
        AccessEntry entry;
        entry.kind = Kind::kMove;
        entry.owner = next_slot_++;
        entry.write = true;
        piece.queue.InsertBefore(Kind::kInstance, program.slot, entry);
        moves_[access.piece] = entry.owner;
        EXPECT_FALSE(piece.queue.MayRead(Kind::kInstance, program.slot));
        EXPECT_FALSE(piece.queue.MayWrite(Kind::kInstance, program.slot));
        return;
      }
    }
  }
  void EndMove(std::map<uint32_t, uint32_t>::iterator move) {
    pieces_[move->first].queue.Remove(Kind::kMove, move->second);
    moves_.erase(move);
  }

  // Before its first write a program leaves as if it had never been; after it, all that it writes
  // is lost, and whoever is queued there fails with it.
  void Fail(uint64_t number) {
    Program* const program = Find(number);
    if (program == nullptr) return;
    const bool wrote = program->Wrote();
    const std::vector<Access> accesses = program->accesses;
    for (Access& access : program->accesses) {
      Stop(&access);
      pieces_[access.piece].queue.Remove(program->kind, program->slot);
    }
    Forget(number);
    for (const Access& access : accesses) {
      if (!access.write || access.gone()) continue;
      Piece& piece = pieces_[access.piece];
      if (wrote) {
        std::vector<uint64_t> queued;
        for (const Program& other : programs_) {
          const bool uses =
              std::any_of(other.accesses.begin(), other.accesses.end(),
                          [&](const Access& a) { return a.piece == access.piece && !a.gone(); });
          if (uses) queued.push_back(other.number);
        }
        for (const uint64_t other : queued) Fail(other);
        piece.contents = piece.promised = number;
        continue;
      }
      for (Program& later : programs_) {
        for (Access& other : later.accesses) {
          if (other.piece == access.piece && other.expected == number)
            other.expected = access.expected;
        }
      }
      if (piece.promised == number) piece.promised = access.expected;
    }
  }

  // The executor's: what runs is gone. Programs that wrote fail, the others begin again from their
  // places, unless what they had read was written since.
  void Die() {
    while (!moves_.empty()) EndMove(moves_.begin());
    std::vector<uint64_t> numbers;
    for (const Program& program : programs_) numbers.push_back(program.number);
    for (const uint64_t number : numbers) {
      Program* const program = Find(number);
      if (program == nullptr) continue;
      if (program->Wrote() && program->kind == Kind::kInstance) {
        Fail(number);
        continue;
      }
      bool overwritten = false;
      for (Access& access : program->accesses) {
        Stop(&access);
        overwritten |= access.gone() && pieces_[access.piece].contents != access.expected;
        if (program->kind == Kind::kCommand && access.gone()) continue;  // a part that is done
        pieces_[access.piece].queue.Restore(program->kind, program->slot, access.uses,
                                            access.write);
        access.begun = access.done = 0;
      }
      if (overwritten && program->kind == Kind::kInstance) Fail(number);
    }
  }

  void Stop(Access* access) {
    Piece& piece = pieces_[access->piece];
    (access->write ? piece.writing : piece.reading) -= access->begun - access->done;
    access->begun = access->done;
  }
  void Forget(uint64_t number) {
    std::erase_if(programs_, [number](const Program& p) { return p.number == number; });
  }

  // Every program that is not done with a piece has its entry there, and where one of two writes,
  // the earlier comes first.
  void CheckOrder() {
    for (uint32_t p = 0; p < kPieces; ++p) {
      std::vector<std::pair<uint64_t, bool>> order;
      for (const AccessEntry& entry : pieces_[p].queue.entries()) {
        if (entry.kind == Kind::kMove) continue;
        const auto owner = std::find_if(programs_.begin(), programs_.end(), [&](const Program& q) {
          return q.kind == entry.kind && q.slot == entry.owner;
        });
        ASSERT_NE(owner, programs_.end()) << "an entry of nobody";
        order.emplace_back(owner->number, entry.write);
      }
      size_t expected = 0;
      for (const Program& program : programs_) {
        for (const Access& access : program.accesses)
          expected += access.piece == p && !access.gone();
      }
      ASSERT_EQ(order.size(), expected);
      for (size_t a = 0; a < order.size(); ++a) {
        for (size_t b = a + 1; b < order.size(); ++b) {
          const bool conflict = order[a].second || order[b].second;
          ASSERT_TRUE(!conflict || order[a].first < order[b].first);
        }
      }
    }
  }

  std::mt19937_64 random_;
  std::array<Piece, kPieces> pieces_;
  std::vector<Program> programs_;       // in submit order
  std::map<uint32_t, uint32_t> moves_;  // piece -> slot
  uint64_t submitted_ = 0, uses_ = 0;
  uint32_t next_slot_ = 0;
};

TEST(AccessProperty, Happy_random_programs_run_as_if_one_after_the_other) {
  uint64_t uses = 0;
  for (uint64_t seed = 1; seed <= 1000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world(seed);
    world.Run();
    if (HasFailure()) return;
    uses += world.uses();
  }
  EXPECT_GT(uses, 100'000u) << "the programs hardly did anything";
}

}  // namespace
}  // namespace slice::gmg
