#include "daemon/server/engine_loop.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <nlohmann/json.hpp>

#include "common/clock.h"
#include "slice/proto/control.pb.h"

namespace slice::server {
namespace {

constexpr int kReportsPerTurn = 1024;
// A throttled tenant, a full command ring: nobody signals when that ends.
constexpr DurationNs kRetryDelay = kMillisecond;

template <typename Item>
std::vector<std::string> Names(const std::vector<Item>& items) {
  std::vector<std::string> names;
  for (const Item& item : items) names.push_back(item.name);
  return names;
}

}  // namespace

EngineLoop::EngineLoop(const engine::Config& config, Options options, Events events)
    : options_(options),
      events_(std::move(events)),
      device_count_(config.devices.size()),
      timeline_(Names(config.devices), Names(config.domains), options.timeline_events_max),
      wake_devices_(config.devices.size()),
      running_since_(config.devices.size()) {}

Result<std::unique_ptr<EngineLoop>> EngineLoop::Create(const engine::Config& config,
                                                       std::span<std::byte> gmg_memory,
                                                       const EngineFactory& factory,
                                                       Options options, Events events) {
  std::unique_ptr<EngineLoop> loop(new EngineLoop(config, options, std::move(events)));
  SLICE_RETURN_IF_ERROR(loop->OpenDescriptors());
  SLICE_ASSIGN_OR_RETURN(loop->engine_, factory(config, gmg_memory, loop.get()));
  return loop;
}

Status EngineLoop::OpenDescriptors() {
  SLICE_RETURN_IF_ERROR(mailbox_.Open());
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  timer_ = Fd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!epoll_.valid() || !timer_.valid())
    return ErrnoError(StatusCode::kNoMemory, errno, "epoll or timerfd");
  for (const int fd : {mailbox_.fd().get(), timer_.get()}) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      return ErrnoError(StatusCode::kNoMemory, errno, "epoll_ctl");
    }
  }
  return Status::Ok();
}

EngineLoop::~EngineLoop() { Stop(); }

void EngineLoop::Start() {
  running_ = true;
  thread_ = std::thread([this] { Main(); });
}

void EngineLoop::Stop() {
  if (!running_) return;
  stopping_.store(true);
  mailbox_.Post([] {});
  thread_.join();
  running_ = false;
  mailbox_.Drain();
}

void EngineLoop::Call(const std::function<void()>& task) {
  if (!running_) {
    now_ = MonotonicNow();
    task();
    return;
  }
  std::mutex mutex;
  std::condition_variable done_changed;
  bool done = false;
  mailbox_.Post([&] {
    task();
    std::lock_guard lock(mutex);
    done = true;
    done_changed.notify_one();
  });
  std::unique_lock lock(mutex);
  done_changed.wait(lock, [&] { return done; });
}

void EngineLoop::Main() {
  while (!stopping_.load()) {
    if (!Turn()) Sleep();
  }
}

// True when something was done, or more is waiting.
bool EngineLoop::Turn() {
  turns_.fetch_add(1, std::memory_order_relaxed);
  now_ = MonotonicNow();
  bool worked = mailbox_.Drain(/*clear=*/false);
  worked |= DrainReports();
  for (auto& [id, tenant] : tenants_) worked |= DrainSubmissions(tenant.get());
  const TimeNs wake = engine_->NextWake();
  now_ = MonotonicNow();
  if (worked || wake <= now_) {
    engine_->Run(now_);
    const TimeNs end = MonotonicNow();
    round_samples_[round_count_++ % round_samples_.size()] = end - now_;
    now_ = end;
    worked = true;
  }
  FlushCommands();
  for (const uint32_t id : to_publish_) {
    const auto found = tenants_.find(id);
    if (found != tenants_.end()) found->second->ring->PublishCompleted();
  }
  to_publish_.clear();
  RunWatches();
  CheckHang();
  return worked;
}

void EngineLoop::Sleep() {
  for (auto& [id, tenant] : tenants_) tenant->ring->SetSleeping(true);
  bool ready = reports_ != nullptr && !reports_->PrepareSleep();
  for (auto& [id, tenant] : tenants_) {
    ready =
        ready || (!tenant->broken && !tenant->ring->throttled() && tenant->ring->HasSubmissions());
  }
  if (!ready) {
    ArmTimer(NextWake());
    std::array<epoll_event, 16> events{};
    // Edge-triggered and never read: see tenant_ring.h. The mailbox is looked at in every turn.
    ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
  }
  if (reports_ != nullptr) reports_->EndSleep();
  for (auto& [id, tenant] : tenants_) tenant->ring->SetSleeping(false);
}

TimeNs EngineLoop::NextWake() const {
  TimeNs wake = engine_->NextWake();
  const TimeNs now = MonotonicNow();
  bool retry = !overflow_.empty();
  for (const auto& [id, tenant] : tenants_)
    retry = retry || (tenant->ring->throttled() && !tenant->broken);
  if (retry) wake = std::min(wake, now + kRetryDelay);
  if (options_.hang_limit > 0 && !hang_reported_) {
    for (const TimeNs since : running_since_) {
      if (since != 0) wake = std::min(wake, since + options_.hang_limit);
    }
  }
  return wake;
}

void EngineLoop::ArmTimer(TimeNs when) {
  if (when == armed_ && when == kNever) return;
  armed_ = when;
  itimerspec spec{};  // zero disarms
  if (when != kNever) {
    const TimeNs at = std::max<TimeNs>(when, 1);
    spec.it_value.tv_sec = at / kSecond;
    spec.it_value.tv_nsec = at % kSecond;
  }
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void EngineLoop::WhenTrue(std::function<bool()> condition, std::function<void()> then) {
  watches_.push_back({std::move(condition), std::move(then)});
}

void EngineLoop::RunWatches() {
  for (size_t i = 0; i < watches_.size();) {
    if (!watches_[i].condition()) {
      ++i;
      continue;
    }
    const std::function<void()> then = std::move(watches_[i].then);
    watches_.erase(watches_.begin() + static_cast<std::ptrdiff_t>(i));
    then();
  }
}

// ---- executor
// -------------------------------------------------------------------------------------------------------

void EngineLoop::AttachExecutor(std::unique_ptr<ExecutorRings> rings, uint64_t generation) {
  executor_generation_ = generation;
  executor_ = std::move(rings);
  commands_ =
      std::make_unique<RecordRing>(executor_->commands.data(), wire::kExecutorRingCapacityBytes);
  reports_ =
      std::make_unique<RecordRing>(executor_->reports.data(), wire::kExecutorRingCapacityBytes);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  SLICE_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, executor_->engine_event.get(), &event) == 0,
              "epoll: executor");
  reports_broken_ = hang_reported_ = false;
  engine_->ExecutorReady(now_);
}

void EngineLoop::DetachExecutor() {
  if (executor_ == nullptr) return;
  while (DrainReports()) {
  }
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, executor_->engine_event.get(), nullptr);
  commands_.reset();
  reports_.reset();
  executor_.reset();
  overflow_.clear();
  std::fill(running_since_.begin(), running_since_.end(), 0);
  engine_->ExecutorLost(now_);
}

void EngineLoop::ExecutorGivenUp() { engine_->ExecutorGivenUp(now_); }

bool EngineLoop::DrainReports() {
  bool any = false;
  for (int i = 0; i < kReportsPerTurn && reports_ != nullptr && !reports_broken_; ++i) {
    Result<bool> popped = reports_->Pop(&record_);
    Status status = popped.status();
    if (popped.ok()) {
      if (!*popped) break;
      any = true;
      NoteReport(record_.type, record_.payload);
      status = engine_->HandleReport(record_.type, record_.payload, now_);
    }
    if (!status.ok()) {
      reports_broken_ = true;
      events_.executor_fault(executor_generation_, status);
      break;
    }
  }
  return any;
}

void EngineLoop::NoteReport(uint32_t type, std::span<const std::byte> payload) {
  const auto set = [this](uint32_t device, TimeNs since) {
    if (device < running_since_.size()) running_since_[device] = since;
  };
  if (type == wire::kStarted && payload.size() == sizeof(wire::Started)) {
    wire::Started started{};
    std::memcpy(&started, payload.data(), sizeof started);
    set(started.device, now_);
  } else if (type == wire::kFinished && payload.size() == sizeof(wire::Finished)) {
    wire::Finished finished{};
    std::memcpy(&finished, payload.data(), sizeof finished);
    set(finished.device, 0);
  } else if (type == wire::kFailed) {
    // Does not say its device; the next Started of each one corrects this.
    std::fill(running_since_.begin(), running_since_.end(), 0);
  }
}

void EngineLoop::CheckHang() {
  if (options_.hang_limit <= 0 || hang_reported_) return;
  for (size_t device = 0; device < running_since_.size(); ++device) {
    if (running_since_[device] == 0 || now_ - running_since_[device] < options_.hang_limit)
      continue;
    hang_reported_ = true;
    events_.executor_fault(
        executor_generation_,
        Error(StatusCode::kTimeout,
              "device %zu: an op has been running for %lld ms, the limit is %lld", device,
              static_cast<long long>((now_ - running_since_[device]) / kMillisecond),
              static_cast<long long>(options_.hang_limit / kMillisecond)));
    return;
  }
}

void EngineLoop::ToExecutor(uint32_t type, std::span<const std::byte> payload, DeviceIndex wake) {
  if (commands_ == nullptr) return;  // the engine will be told again by ExecutorReady
  if (wake < wake_devices_.size()) {
    wake_devices_[wake] = true;
  } else {
    wake_any_ = true;
  }
  if (overflow_.empty() && commands_->Push(type, payload)) return;
  overflow_.push_back({type, {payload.begin(), payload.end()}});
}

void EngineLoop::FlushCommands() {
  if (commands_ == nullptr) return;
  while (!overflow_.empty() && commands_->Push(overflow_.front().type, overflow_.front().payload)) {
    overflow_.pop_front();
    wake_any_ = true;
  }
  bool pushed = wake_any_;
  for (const bool wake : wake_devices_) pushed = pushed || wake;
  if (!pushed) return;
  // Whoever of the executor's threads wakes takes all commands and wakes the devices concerned.
  // None sleeps: one is about to look.
  if (commands_->ConsumerSleeps()) {
    bool signalled = false;
    for (size_t device = 0; device < wake_devices_.size(); ++device) {
      if (!wake_devices_[device]) continue;
      SignalEventFd(executor_->device_events[device]);
      signalled = true;
    }
    if (!signalled) SignalEventFd(executor_->device_events.front());
  }
  wake_any_ = false;
  std::fill(wake_devices_.begin(), wake_devices_.end(), false);
}

// ---- sink
// -----------------------------------------------------------------------------------------------------------

void EngineLoop::Complete(TenantId id, const wire::CompletionSlot& completion,
                          const std::string& text) {
  const auto found = tenants_.find(id.value);
  if (found == tenants_.end()) return;  // ended meanwhile
  Tenant* tenant = found->second.get();
  if (!tenant->live.contains(completion.cookie)) {
    SLICE_LOG_ERROR("server",
                    "the engine completed request %llu of session %u that is not in flight",
                    static_cast<unsigned long long>(completion.cookie), id.value);
    return;
  }
  ReleaseLive(tenant, completion.cookie);
  wire::CompletionSlot slot = completion;
  slot.text_token = text.empty() ? 0 : KeepText(tenant, text);
  tenant->ring->Complete(slot);
  to_publish_.insert(id.value);
}

void EngineLoop::Trace(const engine::TraceEvent& event) { timeline_.Add(event); }

std::string EngineLoop::StatusJson() {
  nlohmann::json status = nlohmann::json::parse(engine_->StatusJson(now_), nullptr, false);
  if (!status.is_object()) status = nlohmann::json::object();
  const size_t count = std::min<size_t>(round_count_, round_samples_.size());
  std::vector<DurationNs> samples(round_samples_.begin(),
                                  round_samples_.begin() + static_cast<std::ptrdiff_t>(count));
  std::sort(samples.begin(), samples.end());
  const auto quantile = [&](size_t percent) {
    return count == 0 ? 0 : samples[(count - 1) * percent / 100];
  };
  status["policy"] = engine_->policy_name();
  status["round_ns_p50"] = quantile(50);
  status["round_ns_p99"] = quantile(99);
  status["engine_turns"] = round_count_;
  status["sessions"] = tenants_.size();
  status["executor_up"] = executor_ != nullptr;
  status["timeline_on"] = timeline_.on();
  return status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace slice::server
