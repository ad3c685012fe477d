#include "options.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "json.hpp"

namespace hx {

namespace {

bool whole(const std::string &text, uint64_t least, uint64_t most, uint64_t &out) {
    if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
    char *end = nullptr;
    errno = 0;
    out = std::strtoull(text.c_str(), &end, 10);
    return errno == 0 && *end == '\0' && out >= least && out <= most;
}

struct Setting {
    const char *key;
    uint64_t least, most;
    void (*set)(Options &, uint64_t);
};

constexpr Setting SETTINGS[] = {
    {"hixl_port", 0, 65535, [](Options &o, uint64_t v) { o.port = static_cast<uint16_t>(v); }},
    {"device", 0, 1 << 20, [](Options &o, uint64_t v) { o.device = static_cast<int32_t>(v); }},
    {"connect_timeout_ms", 1, 3600000, [](Options &o, uint64_t v) { o.connect_timeout_ms = static_cast<int32_t>(v); }},
    {"notify_timeout_ms", 1, 3600000, [](Options &o, uint64_t v) { o.notify_timeout_ms = static_cast<int32_t>(v); }},
    {"busy_ms", 0, 3600000, [](Options &o, uint64_t v) { o.busy_ms = v; }},
    {"spin_us", 0, 1000000, [](Options &o, uint64_t v) { o.spin_us = v; }},
    {"poll_max_us", 1, 1000000, [](Options &o, uint64_t v) { o.poll_max_us = v; }},
    {"notes_poll_ms", 1, 1000, [](Options &o, uint64_t v) { o.notes_poll_ms = v; }},
    {"in_flight", 1, 4096, [](Options &o, uint64_t v) { o.in_flight = static_cast<uint32_t>(v); }},
    {"request_descriptors", 1, 65536, [](Options &o, uint64_t v) { o.request_descriptors = static_cast<uint32_t>(v); }},
    {"pending_notes", 1, 1 << 30, [](Options &o, uint64_t v) { o.pending_notes = v; }},
    {"threads", 2, 1024, [](Options &o, uint64_t v) { o.threads = static_cast<uint32_t>(v); }},
};

struct Choice {
    const char *key;
    std::vector<const char *> words;
    void (*set)(Options &, size_t);
};

const std::vector<Choice> &choices() {
    static const std::vector<Choice> all = {
        {"backend", {"auto", "comm", "cs", "fab"}, [](Options &o, size_t i) { o.backend = static_cast<Backend>(i); }},
        {"host_memory", {"auto", "pinned", "pages"},
         [](Options &o, size_t i) { o.host_memory = static_cast<HostMemory>(i); }},
        {"notify_via", {"hixl", "control"}, [](Options &o, size_t i) { o.notify_control = i == 1; }},
        {"connect_via", {"threads", "async"}, [](Options &o, size_t i) { o.connect_async = i == 1; }},
    };
    return all;
}

// Keys of Initialize; the adxl forms are aliases of the same.
constexpr const char *HIXL_KEYS[] = {
    "BufferPool",         "GlobalResourceConfig",  "AutoConnect",           "LocalCommRes",
    "EnableUseFabricMem", "RdmaTrafficClass",      "RdmaServiceLevel",      "adxl.BufferPool",
    "adxl.LocalCommRes",  "adxl.RdmaTrafficClass", "adxl.RdmaServiceLevel",
};

// Keys of GlobalResourceConfig that are numbers.
struct Range {
    const char *key;
    double least, most;
};
constexpr Range RANGES[] = {
    {"fabric_memory.max_capacity", 1, 1024},
    {"fabric_memory.start_address", 0, 1024},
    {"fabric_memory.task_stream_num", 1, 8},
    {"connect_pool.thread_num", 1, 64},
    {"connect_pool.task_queue_capacity", 1, 65535},
    {"comm_resource_config.listen_port", 1, 65535},
    {"comm_resource_config.qos", 0, 7},
    {"comm_resource_config.max_active_channels", 1, 4294967295.0},
    {"channel_pool.max_channel", 1, 512},
};
constexpr const char *PROTOCOLS[] = {"roce:device",   "hccs:device", "ub_ctp:device", "uboe:device",
                                     "ub_rtp:device", "roce:host",   "ub_ctp:host"};

bool known_protocol(const Json &value) {
    if (value.kind != Json::STRING) return false;
    for (const char *name : PROTOCOLS)
        if (value.text == name) return true;
    return false;
}

// Empty, or what is wrong with one field of GlobalResourceConfig.
std::string field_problem(const std::string &key, const Json &value) {
    for (const Range &range : RANGES) {
        if (key != range.key) continue;
        double number;
        if (!value.number(number) || number != static_cast<double>(static_cast<int64_t>(number)) || number < range.least
            || number > range.most)
            return key + " must be a whole number from " + std::to_string(static_cast<int64_t>(range.least)) + " to "
                   + std::to_string(static_cast<int64_t>(range.most));
        return "";
    }
    if (key == "fabric_memory.enable_aicpu_unfold")
        return value.kind == Json::BOOLEAN ? "" : key + " must be true or false";
    if (key == "local_comm_res_path")
        return value.kind == Json::STRING && !value.text.empty() ? "" : key + " must be a path";
    if (key == "channel_pool.high_waterline" || key == "channel_pool.low_waterline") {
        double number;
        return value.number(number) && number > 0 && number < 1 ? "" : key + " must lie between 0 and 1";
    }
    if (key == "comm_resource_config.protocol_desc") {
        bool fine = value.kind == Json::LIST || known_protocol(value);
        for (const Json &item : value.items) fine = fine && known_protocol(item);
        if (fine) return "";
        std::string out = key + " must be one or a list of";
        for (const char *name : PROTOCOLS) out += std::string(" ") + name;
        return out;
    }
    std::string out = "there is no " + key;
    out +=
        "; there are fabric_memory.enable_aicpu_unfold local_comm_res_path channel_pool.high_waterline "
        "channel_pool.low_waterline comm_resource_config.protocol_desc";
    for (const Range &range : RANGES) out += std::string(" ") + range.key;
    return out;
}

std::string resources_problem(const std::string &text) {
    if (text.empty()) return "";
    Json config;
    std::string error;
    if (!Json::parse(text, config, error)) return "it is no JSON: " + error;
    if (config.kind != Json::OBJECT) return "it must be a JSON object";
    Json flat;
    for (const auto &entry : config.fields) {
        if (entry.first == "fabric_memory" && entry.second.kind == Json::OBJECT)
            for (const auto &nested : entry.second.fields)
                flat.fields.emplace_back("fabric_memory." + nested.first, nested.second);
        else flat.fields.push_back(entry);
    }
    for (const auto &entry : flat.fields) {
        const std::string problem = field_problem(entry.first, entry.second);
        if (!problem.empty()) return problem;
    }
    const Json *streams = flat.field("fabric_memory.task_stream_num"),
               *unfold = flat.field("fabric_memory.enable_aicpu_unfold");
    double number = 1;
    if (streams != nullptr && streams->number(number) && number != 1 && (unfold == nullptr || unfold->truth))
        return "fabric_memory.task_stream_num must be 1 unless fabric_memory.enable_aicpu_unfold is false";
    const Json *high = flat.field("channel_pool.high_waterline"), *low = flat.field("channel_pool.low_waterline");
    const bool most = flat.field("channel_pool.max_channel") != nullptr;
    if ((high == nullptr) != (low == nullptr) || (most && high == nullptr))
        return "channel_pool.max_channel, channel_pool.high_waterline and channel_pool.low_waterline belong together";
    double upper = 1, lower = 0;
    if (high != nullptr && high->number(upper) && low->number(lower) && upper <= lower)
        return "channel_pool.high_waterline must be above channel_pool.low_waterline";
    return "";
}

// Empty, or what is wrong with the value of one of HIXL's own keys.
std::string hixl_problem(const std::string &key, const std::string &value) {
    const std::string name = key.rfind("adxl.", 0) == 0 ? key.substr(5) : key;
    uint64_t number;
    if (name == "AutoConnect") return value == "0" || value == "1" ? "" : "it must be 0 or 1";
    if (name == "EnableUseFabricMem") return value.empty() || value == "0" || value == "1" ? "" : "it must be 0 or 1";
    if (name == "RdmaTrafficClass")
        return value.empty() || (whole(value, 0, 255, number) && number % 4 == 0)
                   ? ""
                   : "it must be a multiple of 4 from 0 to 255";
    if (name == "RdmaServiceLevel")
        return value.empty() || whole(value, 0, 7, number) ? "" : "it must be a whole number from 0 to 7";
    if (name == "BufferPool") {
        const size_t colon = value.find(':');
        uint64_t count, size;
        const bool fine = colon != std::string::npos && whole(value.substr(0, colon), 0, UINT32_MAX, count)
                          && whole(value.substr(colon + 1), 0, UINT32_MAX, size) && (count == 0) == (size == 0);
        return fine ? "" : "it must be COUNT:MIB, or 0:0 for none";
    }
    if (name == "GlobalResourceConfig") return resources_problem(value);
    if (name == "LocalCommRes") {
        Json res;
        std::string error;
        if (value.empty()) return "";
        if (!Json::parse(value, res, error)) return "it is no JSON: " + error;
        const Json *version = res.field("version");
        return version != nullptr && version->kind == Json::STRING
                   ? ""
                   : "it must be a JSON object with a version, such as {\"version\":\"1.3\"}";
    }
    return "";
}

// Empty, or why HIXL could not read a LocalCommRes from a file.
std::string read_resources(const std::string &path, std::string &text) {
    struct stat about;
    if (stat(path.c_str(), &about) != 0) return std::strerror(errno);
    if (!S_ISREG(about.st_mode) || about.st_size < 1 || about.st_size > 1 << 20)
        return "it must be a regular file of 1 byte to 1 MiB";
    std::ifstream file(path, std::ios::binary);
    text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!file) return "it cannot be read";
    Json json;
    std::string error;
    return Json::parse(text, json, error) ? "" : "it is no JSON: " + error;
}

bool is_950(const std::string &npu) { return npu.find("Ascend950") != std::string::npos; }

bool at_host_nic(const Json &endpoint) {
    const Json *protocol = endpoint.field("protocol"), *placement = endpoint.field("placement");
    return protocol != nullptr && protocol->text == "roce" && placement != nullptr && placement->text == "host";
}

std::string list_of_keys() {
    std::string out = "library hixl_ip";
    for (const Setting &setting : SETTINGS) out += std::string(" ") + setting.key;
    for (const Choice &choice : choices()) out += std::string(" ") + choice.key;
    for (const char *key : HIXL_KEYS) out += std::string(" ") + key;
    return out;
}

int cpus() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// Not all addresses, none, or those of a group.
bool of_one_machine(const std::string &ip) {
    struct in_addr four;
    struct in6_addr six;
    if (inet_pton(AF_INET6, ip.c_str(), &six) == 1) {
        if (!IN6_IS_ADDR_V4MAPPED(&six)) return !IN6_IS_ADDR_UNSPECIFIED(&six) && !IN6_IS_ADDR_MULTICAST(&six);
        std::memcpy(&four, six.s6_addr + 12, sizeof four);
    } else inet_pton(AF_INET, ip.c_str(), &four);
    const uint32_t number = ntohl(four.s_addr);
    return number >> 24 != 0 && !IN_MULTICAST(number) && number != INADDR_BROADCAST;
}

// "": it was taken; else what is wrong.
std::string take(Options &out, const std::string &key, const std::string &value) {
    if (key == "library") {
        out.library = value;
        return value.empty() ? "it must be a file or a folder" : "";
    }
    if (key == "hixl_ip") {
        out.ip = value;
        if (!valid_address(address_text(value, 1)))
            return "it must be a literal IPv4 or IPv6 address, for HIXL asks no name server";
        return of_one_machine(value) ? "" : "it must be an address of this machine that peers can connect to";
    }
    for (const Setting &setting : SETTINGS) {
        if (key != setting.key) continue;
        uint64_t number;
        if (!whole(value, setting.least, setting.most, number))
            return "it must be a whole number from " + std::to_string(setting.least) + " to "
                   + std::to_string(setting.most);
        setting.set(out, number);
        return "";
    }
    for (const Choice &choice : choices()) {
        if (key != choice.key) continue;
        std::string words;
        for (size_t i = 0; i < choice.words.size(); i++) {
            if (value == choice.words[i]) {
                choice.set(out, i);
                return "";
            }
            words += std::string(i == 0 ? "" : ", ") + choice.words[i];
        }
        return "it must be one of " + words;
    }
    for (const char *name : HIXL_KEYS) {
        if (key != name) continue;
        out.hixl[key] = value;
        return hixl_problem(key, value);
    }
    return "there is no such option; there are " + list_of_keys();
}

}  // namespace

bool valid_address(const std::string &text) {
    const size_t colon = text.rfind(':');
    uint64_t port;
    if (colon == std::string::npos || !whole(text.substr(colon + 1), 1, 65535, port)) return false;
    std::string ip = text.substr(0, colon);
    unsigned char space[sizeof(struct in6_addr)];
    if (ip.size() > 2 && ip.front() == '[' && ip.back() == ']')
        return inet_pton(AF_INET6, ip.substr(1, ip.size() - 2).c_str(), space) == 1;
    return inet_pton(AF_INET, ip.c_str(), space) == 1;
}

std::string address_text(const std::string &ip, uint16_t port) {
    return (ip.find(':') != std::string::npos ? "[" + ip + "]" : ip) + ":" + std::to_string(port);
}

const char *word_of(Backend backend) {
    static const char *const words[] = {"auto", "comm", "cs", "fab"};
    return words[static_cast<size_t>(backend)];
}

std::string Options::given(const std::string &key) const {
    for (const std::string &name : {key, "adxl." + key}) {
        const auto found = hixl.find(name);
        if (found != hixl.end()) return found->second;
    }
    return "";
}

bool Options::auto_connect() const { return given("AutoConnect") == "1"; }

int Options::parse(const hxa_option *options, size_t n, std::string &error) {
    if (cpus() < 2) spin_us = 0;  // whoever spins keeps the others from what it waits for
    for (size_t i = 0; i < n; i++) {
        const std::string key = options[i].key, value = options[i].value;
        const std::string problem = take(*this, key, value);
        if (problem.empty()) continue;
        error = "hixl: " + key + "=" + value.substr(0, 60) + ": " + problem;
        return -HXA_E_INVALID;
    }
    const std::string problem = choose();
    if (!problem.empty()) {
        error = "hixl: " + problem;
        return -HXA_E_INVALID;
    }
    // TransferSync alone uses the pool, and this driver never calls it: it would only cost 64 MiB of the NPU.
    if (given("BufferPool").empty()) hixl["BufferPool"] = "0:0";
    return 0;
}

// Empty, or why the options cannot be followed.  The order is HIXL's own, which takes the first that it finds; where two
// disagree the second would be ignored without a word, so that they are refused here.
std::string Options::choose() {
    // HIXL takes what is empty for absent, and 0 is what it does without the key, which one of the back-ends refuses.
    const std::string fabric = given("EnableUseFabricMem");
    if (fabric == "0") hixl.erase("EnableUseFabricMem");
    for (auto entry = hixl.begin(); entry != hixl.end();)
        entry = entry->second.empty() ? hixl.erase(entry) : std::next(entry);
    for (const auto &entry : hixl)
        if (hixl.count("adxl." + entry.first) != 0)
            return entry.first + " and adxl." + entry.first + " are one option; leave one of them out";

    struct Selector {
        std::string option;
        Backend backend;
    };
    std::vector<Selector> selectors;
    if (fabric == "1") selectors.push_back({"EnableUseFabricMem=1", Backend::FAB});
    Json config, resources;
    std::string ignored, name = "LocalCommRes", text = given(name);
    Json::parse(given("GlobalResourceConfig"), config, ignored);
    const Json *path = config.field("local_comm_res_path");
    if (path != nullptr && text.empty()) {
        name = "local_comm_res_path";
        const std::string problem = read_resources(path->text, text);
        if (!problem.empty()) return "GlobalResourceConfig: local_comm_res_path=" + path->text + ": " + problem;
    }
    if (!text.empty() && Json::parse(text, resources, ignored)) {
        const Json *version = resources.field("version");
        const bool new_form = version != nullptr && version->kind == Json::STRING && version->text == "1.3";
        selectors.push_back({name + (new_form ? " of version 1.3" : " of a version before 1.3"),
                             new_form ? Backend::CS : Backend::COMM});
    }
    const Json *protocols = config.field("comm_resource_config.protocol_desc");
    if (protocols != nullptr && (protocols->kind == Json::STRING || !protocols->items.empty()))
        selectors.push_back({"comm_resource_config.protocol_desc", Backend::CS});
    if (backend != Backend::AUTO) selectors.push_back({std::string("backend=") + word_of(backend), backend});
    const Json *endpoints = resources.field("endpoint_list");
    if (endpoints != nullptr)
        for (const Json &endpoint : endpoints->items) host_nic = host_nic || at_host_nic(endpoint);
    if (protocols != nullptr) {
        host_nic = host_nic || protocols->text == "roce:host";
        for (const Json &protocol : protocols->items) host_nic = host_nic || protocol.text == "roce:host";
    }
    const char *remedy = "; leave one of them out, here and at every peer";
    for (const Selector &selector : selectors)
        if (selector.backend != selectors.front().backend)
            return selectors.front().option + " chooses the back-end " + word_of(selectors.front().backend) + ", but "
                   + selector.option + " chooses " + word_of(selector.backend) + remedy;
    if (backend == Backend::FAB && fabric == "0")
        return std::string("backend=fab chooses the back-end fab, but EnableUseFabricMem=0 forbids it") + remedy;
    if (selectors.empty()) return "";

    // A back-end that was asked for by name alone takes the option of HIXL's that chooses it.
    backend = selectors.front().backend;
    chosen_by = selectors.front().option;
    if (selectors.size() == 1 && chosen_by == "backend=cs") hixl["LocalCommRes"] = "{\"version\":\"1.3\"}";
    if (backend == Backend::FAB) hixl["EnableUseFabricMem"] = "1";
    const std::string pool = given("BufferPool");
    if (backend != Backend::COMM && !pool.empty() && pool != "0:0")
        return "BufferPool=" + pool + " is for the back-end comm alone, but " + chosen_by + " chooses "
               + word_of(backend) + remedy;
    return "";
}

Backend Options::backend_on(const std::string &npu) const {
    const bool left_to_it = backend == Backend::AUTO || chosen_by == "backend=comm";
    if (!left_to_it) return backend;
    return is_950(npu) ? Backend::CS : Backend::COMM;
}

bool Options::pages_on(const std::string &npu) const {
    return host_memory == HostMemory::PAGES || (host_memory == HostMemory::AUTO && host_nic && is_950(npu));
}

}  // namespace hx
