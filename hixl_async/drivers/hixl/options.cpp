#include "options.hpp"

#include <sched.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "address.hpp"
#include "json.hpp"
#include "number.hpp"

namespace hx {

namespace {

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

// Options of Initialize that HIXL documents; others go there with a warning.
constexpr const char *HIXL_KEYS[] = {
    "BufferPool",         "GlobalResourceConfig",  "AutoConnect",           "LocalCommRes",
    "EnableUseFabricMem", "RdmaTrafficClass",      "RdmaServiceLevel",      "adxl.BufferPool",
    "adxl.LocalCommRes",  "adxl.RdmaTrafficClass", "adxl.RdmaServiceLevel",
};

bool is_documented(const std::string &key) {
    return std::any_of(std::begin(HIXL_KEYS), std::end(HIXL_KEYS), [&key](const char *name) { return key == name; });
}

constexpr const char *PROTOCOLS = "comm_resource_config.protocol_desc", *RESOURCES_PATH = "local_comm_res_path";

// The next functions check what this driver reads itself; HIXL checks the rest.  Return the problem or an empty string.
std::string config_problem(const std::string &text) {
    if (text.empty()) return "";
    Json config;
    std::string error;
    if (!Json::parse(text, config, error)) return "it is no JSON: " + error;
    if (config.kind != Json::OBJECT) return "it must be a JSON object";
    const Json *path = config.field(RESOURCES_PATH), *protocols = config.field(PROTOCOLS);
    if (path != nullptr && (path->kind != Json::STRING || path->text.empty()))
        return std::string(RESOURCES_PATH) + " must be a path";
    if (protocols == nullptr || protocols->kind == Json::STRING) return "";
    const auto is_text = [](const Json &item) { return item.kind == Json::STRING; };
    if (protocols->kind == Json::LIST && std::all_of(protocols->items.begin(), protocols->items.end(), is_text))
        return "";
    return std::string(PROTOCOLS) + " must be a protocol, such as \"roce:device\", or a list of them";
}

std::string resources_problem(const std::string &text) {
    if (text.empty()) return "";
    Json resources;
    std::string error;
    if (!Json::parse(text, resources, error)) return "it is no JSON: " + error;
    const Json *version = resources.field("version");
    return version != nullptr && version->kind == Json::STRING
               ? ""
               : "it must be a JSON object with a version, such as {\"version\":\"1.3\"}";
}

std::string plain_name(const std::string &key) { return key.rfind("adxl.", 0) == 0 ? key.substr(5) : key; }

// Return false for an option that is known to be none.  A truth value of the program comes as "true" or "false".
bool may_be_flag(const std::string &key) {
    const std::string name = plain_name(key);
    return name == "AutoConnect" || name == "EnableUseFabricMem" || !is_documented(key);
}

std::string hixl_problem(const std::string &key, const std::string &value) {
    const std::string name = plain_name(key);
    if (name == "AutoConnect") return value == "0" || value == "1" ? "" : "it must be 0 or 1";
    if (name == "EnableUseFabricMem") return value.empty() || value == "0" || value == "1" ? "" : "it must be 0 or 1";
    if (name == "GlobalResourceConfig") return config_problem(value);
    if (name == "LocalCommRes") return resources_problem(value);
    return "";
}

// Return why HIXL could not read a LocalCommRes from a file, or an empty string.
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

int cpus() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// Take an option.  Return the problem, or an empty string.
std::string take(Options &out, const std::string &key, const std::string &value) {
    if (key == "library") {
        out.library = value;
        return value.empty() ? "it must be a file or a folder" : "";
    }
    if (key == "hixl_ip") {
        out.ip = value;
        if (!valid_address(address_text(value, 1)))
            return "it must be a literal IPv4 or IPv6 address, because HIXL asks no name server";
        return is_of_one_machine(value) ? "" : "it must be an address of this machine that peers can connect to";
    }
    for (const Setting &setting : SETTINGS) {
        if (key != setting.key) continue;
        uint64_t number;
        if (!whole_number(value, setting.least, setting.most, number))
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
    const bool flag = may_be_flag(key);
    out.hixl[key] = flag && value == "true" ? "1" : flag && value == "false" ? "0" : value;
    if (!is_documented(key)) out.unknown += (out.unknown.empty() ? "" : ", ") + key;
    return hixl_problem(key, out.hixl[key]);
}

}  // namespace

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
    if (cpus() < 2) spin_us = 0;  // a thread that spins would keep the others from doing what it waits for
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
    // Only TransferSync uses the pool, which this driver never calls: the pool would cost 64 MiB of the NPU.
    if (given("BufferPool").empty()) hixl["BufferPool"] = "0:0";
    return 0;
}

// Return why the options cannot be followed, or an empty string.  The order is that of HIXL, which takes the first that it
// finds.  Where two disagree it would ignore the second silently, so that they are refused here.
std::string Options::choose() {
    // HIXL takes an empty value for an absent one.  0 is the default of this key, which one of the back-ends refuses.
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
    const Json *path = config.field(RESOURCES_PATH);
    if (path != nullptr && text.empty()) {
        name = RESOURCES_PATH;
        const std::string problem = read_resources(path->text, text);
        if (!problem.empty()) return std::string("GlobalResourceConfig: ") + RESOURCES_PATH + "=" + path->text + ": " + problem;
    }
    if (!text.empty() && Json::parse(text, resources, ignored)) {
        const Json *version = resources.field("version");
        const bool new_form = version != nullptr && version->kind == Json::STRING && version->text == "1.3";
        selectors.push_back({name + (new_form ? " of version 1.3" : " of a version before 1.3"),
                             new_form ? Backend::CS : Backend::COMM});
    }
    const Json *protocols = config.field(PROTOCOLS);
    if (protocols != nullptr && (protocols->kind == Json::STRING || !protocols->items.empty()))
        selectors.push_back({PROTOCOLS, Backend::CS});
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

    // A back-end that only `backend` asks for wants the option of HIXL that chooses it.
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
